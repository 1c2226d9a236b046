"""The classes that a simulated worker is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

from farcall.protocol.contexts import Contexts
from farcall.protocol.passes import PassMachine
from simulator.backward.reach import SimulatedReach


class Machines(NamedTuple):
    """Those that ship, but for one that a planted bug replaces."""

    passes: type[PassMachine] = PassMachine
    contexts: type[Contexts[Any]] = Contexts
    reach: type[SimulatedReach] = SimulatedReach
