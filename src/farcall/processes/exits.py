"""The end of a process, in words for a person."""

from __future__ import annotations

import signal
from pathlib import Path

_HINTS = {
    "SIGABRT": "an abort in compiled code",
    "SIGBUS": "is shared memory, /dev/shm, full?",
    "SIGFPE": "a division by zero in compiled code",
    "SIGILL": "compiled for another processor?",
    "SIGSEGV": "a crash in compiled code",
}
ROOT = Path("/")  # where the files of the kernel are


class MemoryKills:
    """Counts the processes that the kernel has killed for lack of memory since this was made."""

    def __init__(self) -> None:
        self._before = oom_kills()

    def since(self) -> int | None:
        """Return the number, or None if the kernel's counter can't be read."""
        now = oom_kills()
        return None if now is None or self._before is None else now - self._before


def in_words(code: int, kills: int | None = None) -> str:
    """Describe the end of a process: "exit code 3", "killed by SIGKILL: out of memory?".

    Args:
        code: as `subprocess.Popen.returncode` has it: a negative one is a signal's number.
        kills: what `MemoryKills.since` has said.
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    if name != "SIGKILL":
        return f"killed by {name}: {_HINTS[name]}" if name in _HINTS else f"killed by {name}"
    if kills:
        return f"killed by {name}: out of memory (the kernel counts {kills} such kills)"
    counted = "" if kills is None else " (the kernel counts no such kill)"
    return f"killed by {name}: out of memory?{counted}"


def exit_status(code: int) -> int:
    """Return the status with which a parent passes on the end of its child, as shells do."""
    return code if code >= 0 else 128 - code


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a signal of real time
        return f"signal {number}"


def oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel has killed for lack of memory so far.

    Of the whole machine where the cgroup does not say it; None where nothing does.
    """
    for path in (*_counters_of_cgroup(), ROOT / "proc/vmstat"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdecimal():
                return int(number)
    return None


def _counters_of_cgroup() -> list[Path]:
    """Return the files that may have the counter: of cgroups version 2 and 1."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mounted = ROOT / "sys/fs/cgroup"
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = mounted, "memory.events"
        elif "memory" in controllers.split(","):
            base, name = mounted / "memory", "memory.oom_control"
        else:
            continue
        # Inside of a container its own cgroup is mounted as the root.
        found += [base / path.lstrip("/") / name, base / name]
    return found
