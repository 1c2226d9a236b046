"""Tools for tests of your own programs: a clock moved by hand, and a network with faults.

`farcall.testing.cluster` starts several workers in one process, and `farcall.testing.faults` loses
and delays messages of a running worker; both need torch.
"""

from farcall.testing.clock import ManualClock
from farcall.testing.network import Faults, Network

__all__ = ["Faults", "ManualClock", "Network"]


def __dir__() -> list[str]:
    return __all__
