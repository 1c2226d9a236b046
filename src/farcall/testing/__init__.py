"""Tools for tests: a clock moved by hand, a network with faults, and the protocol's simulator.

Product code: test your own programs with them. `python -m farcall.testing.sim` runs the simulator;
`farcall.testing.cluster` starts several workers in one process (it needs torch, the rest does not).
"""

from farcall.testing.clock import ManualClock
from farcall.testing.network import Faults, Network
from farcall.testing.oracle import Violation
from farcall.testing.planted import PlantedBug
from farcall.testing.simulation import Event, Result, simulate

__all__ = [
    "Event",
    "Faults",
    "ManualClock",
    "Network",
    "PlantedBug",
    "Result",
    "Violation",
    "simulate",
]
