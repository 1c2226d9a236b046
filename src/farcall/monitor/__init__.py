"""Looks at workers from outside: their state, their calls, and their waits.

It asks the workers over their own authenticated connections, and needs no daemon. Of this machine
it finds those of the same user by itself, whatever their secrets are; others by what these know,
with the secret or the certificates that a worker would use.
"""

from farcall.monitor.asking import AskResult, SilentWorker, ask_all
from farcall.monitor.checkup import Diagnosis, Pair, doctor
from farcall.monitor.findings import Finding
from farcall.monitor.hangs import explain

__all__ = [
    "AskResult",
    "Diagnosis",
    "Finding",
    "Pair",
    "SilentWorker",
    "ask_all",
    "doctor",
    "explain",
]
