"""Tools for tests: a clock moved by hand, a network with faults, and the protocol's simulator.

Product code: test your own programs with them. `python -m farcall.testing.sim` runs the simulator,
of calls and references; in `farcall.testing.backward`, of backward passes; in
`farcall.testing.connecting`, of how workers are reached; in `farcall.testing.termination`, of how
they leave; in `farcall.testing.directory`, of how they know each other. Two things need torch:
`farcall.testing.cluster` starts several workers in one process, and `farcall.testing.gradients`
runs random autograd programs on them.
"""

from farcall.testing.clock import ManualClock
from farcall.testing.network import Faults, Network
from farcall.testing.planted import PlantedBug
from farcall.testing.schedule import Event, Result, Violation
from farcall.testing.simulation import simulate

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


def __dir__() -> list[str]:
    return __all__
