"""The common part of the simulations of all protocols.

A schedule is drawn from one `random.Random(seed)`. The events in it that need not happen are its
*inputs*: what users do, and what goes wrong. They are numbered in the order in which they are
drawn, and a shrinker leaves some of them out (see `shrinking`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from farcall.testing.clock import ManualClock
from farcall.testing.network import Faults
from simulator.story import told


class Violation(NamedTuple):
    """A broken promise: its name, and the evidence."""

    invariant: str
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


class Event(NamedTuple):
    """Something that happened, for the log."""

    moment: float  # seconds
    what: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.moment * 1000:9.3f} ms  {' '.join(map(told, self.what))}"


class Result(NamedTuple):
    """The result of a schedule.

    Attributes:
        seed: replays it.
        faults: what may go wrong with its messages.
        inputs: how many inputs were drawn.
        violations: broken invariants; none is as it should be.
        log: all events, in order; `str` of one is a line.
    """

    seed: int
    faults: object
    inputs: int
    violations: tuple[Violation, ...]
    log: tuple[Event, ...]

    @property
    def events(self) -> int:
        """Return how many things happened."""
        return len(self.log)


class Script(NamedTuple):
    """The way to run a schedule again with fewer inputs, and all else as much as before as can be.

    Attributes:
        left_out: the numbers of the inputs that do not happen.
        states: of the random source at each input when it happened for the first time.
    """

    left_out: frozenset[int]
    states: dict[int, tuple[Any, ...]]


class Schedule(ABC):
    """One schedule.

    Args:
        seed: equal arguments give equal results.
        script: says which inputs happen; None: all.
    """

    def __init__(self, seed: int, script: Script | None) -> None:
        self._seed = seed
        self._script = script
        self._inputs = 0
        self._random = Random(seed)
        self._clock = ManualClock()
        self._faults: Any = Faults()
        self._violations: list[Violation] = []
        self._log: list[Event] = []

    def run(self) -> Result:
        """Let all happen."""
        try:
            self._play()
        except (AttributeError, AssertionError, IndexError, KeyError, ValueError) as error:
            self._violate("ERROR", f"a machine raised {type(error).__name__}: {error}")
        violations, log = tuple(self._violations), tuple(self._log)
        return Result(self._seed, self._faults, self._inputs, violations, log)

    @abstractmethod
    def _play(self) -> None:
        """Let one thing happen after the other, until an invariant is broken or nothing is left."""

    def _happens(self) -> bool:
        """Return whether the next input happens.

        Draw what it needs before you ask, if you can: then the next ones are drawn as with it.
        """
        self._inputs += 1
        return self._script is None or self._inputs not in self._script.left_out

    def _perform(self, number: int, act: Callable[[], object]) -> None:
        """Let an input happen, for which the same is drawn whatever was left out before it."""
        if self._script is not None:
            states = self._script.states
            if number in states:
                self._random.setstate(states[number])
            else:
                states[number] = self._random.getstate()
        act()

    def _violate(self, invariant: str, text: str) -> None:
        self._violations.append(Violation(invariant, text))

    def _note(self, *what: object) -> None:
        self._log.append(Event(self._clock.now, what))
