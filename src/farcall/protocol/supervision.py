"""Decide when supervised objects are made again or given up, as OTP's supervisors do.

A supervision has *children*, objects in an order. Each has a *generation*, 1 at first and one more
each time that it is to be made again: an object made as an earlier generation does not count.

SUP-1 (one at a time) At most the newest generation of a child is asked for, and only once.
SUP-2 (intensity) Once there were more than `restarts` restarts within `per` seconds, all children
      are given up. A death counts once, however many children it has taken.
SUP-3 (order) Unless children are restarted one for one, one is made only when all before it run.
SUP-4 (the end) A child that has ended, or was given up, is never made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Strategy(Enum):
    """A rule for the children that are made again when one is lost."""

    ONE = "one_for_one"  # that one
    ALL = "all"  # all of them
    REST = "rest"  # that one and those after it


class Phase(Enum):
    """The phase of a child. `TRANSITIONS` has what follows what."""

    WAITING = "waiting"  # for those before it
    MAKING = "making"
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS: Mapping[tuple[Phase, str], Phase] = {
    (Phase.WAITING, "begin"): Phase.MAKING,
    (Phase.MAKING, "made"): Phase.RUNNING,
    (Phase.MAKING, "restart"): Phase.WAITING,
    (Phase.RUNNING, "restart"): Phase.WAITING,
    (Phase.WAITING, "restart"): Phase.WAITING,
    (Phase.MAKING, "end"): Phase.ENDED,
    (Phase.RUNNING, "end"): Phase.ENDED,
    (Phase.WAITING, "end"): Phase.ENDED,
}


class Make(NamedTuple):
    """Instruction: make a child, and tell of that by `made` or `failed`."""

    child: int
    generation: int


class SupervisionMachine:
    """The children of one supervision. Not thread-safe.

    Args:
        count: of the children.
        strategy: which are made again when one is lost.
        restarts: how many restarts are too few to give up, within `per` seconds.
        per: seconds.
    """

    def __init__(self, count: int, strategy: Strategy, restarts: int, per: float) -> None:
        self.strategy = strategy
        self.restarts = restarts
        self.per = per
        self.phases = [Phase.WAITING] * count
        self.generations = [1] * count
        self.times: list[float] = []  # of the restarts that count, in seconds of `now`
        self.given_up = ""  # why
        self._to_do: list[Make] = []

    @property
    def is_over(self) -> bool:
        """Return whether nothing will be made any more."""
        return bool(self.given_up) or all(phase is Phase.ENDED for phase in self.phases)

    def resume(
        self, phases: Sequence[Phase], generations: Sequence[int], times: Iterable[float]
    ) -> None:
        """Go on where another supervisor was. A child that it was making is made anew."""
        self.times = list(times)
        for child, (phase, generation) in enumerate(zip(phases, generations, strict=True)):
            is_settled = phase in (Phase.RUNNING, Phase.ENDED)
            self.phases[child] = phase if is_settled else Phase.WAITING
            self.generations[child] = generation + (phase is Phase.MAKING)
        self.begin()

    def take(self) -> list[Make]:
        """Return the instructions since the last call, once."""
        to_do, self._to_do = self._to_do, []
        return to_do

    # Events.

    def begin(self) -> None:
        """Ask for the children whose turn it is."""
        if self.given_up:
            return
        for child, generation in enumerate(self.generations):
            if self.phases[child] is Phase.WAITING:
                self._step(child, "begin")
                self._to_do.append(Make(child, generation))
            if self.phases[child] is Phase.MAKING and self.strategy is not Strategy.ONE:
                return

    def made(self, child: int, generation: int) -> bool:
        """Hear that a child was made; return whether it counts."""
        if not self._is_awaited(child, generation):
            return False
        self._step(child, "made")
        self.begin()
        return True

    def failed(self, child: int, generation: int, why: str, now: float) -> bool:
        """Hear that a child could not be made; return whether that counts."""
        if not self._is_awaited(child, generation):
            return False
        self._restart({child}, why, now)
        return True

    def on_children_lost(self, children: Collection[int], why: str, now: float) -> None:
        """Hear that a death has taken children with it. Only those that run count."""
        running = {child for child in children if self.phases[child] is Phase.RUNNING}
        if running and not self.given_up:
            self._restart(running, why, now)

    def ended(self, child: int, generation: int) -> None:
        """Hear that a child was ended on purpose."""
        if self.generations[child] == generation and self.phases[child] is Phase.RUNNING:
            self._step(child, "end")
            self.begin()

    def _is_awaited(self, child: int, generation: int) -> bool:
        is_newest = self.generations[child] == generation
        return is_newest and self.phases[child] is Phase.MAKING and not self.given_up

    def _restart(self, gone: Collection[int], why: str, now: float) -> None:
        self.times = [*(time for time in self.times if now - time < self.per), now]
        if len(self.times) > self.restarts:
            self.given_up = f"more than {self.restarts} restarts within {self.per:g} s: {why}"
            self._to_do = []
            return
        for child in self._affected(gone):
            self._step(child, "restart")
            self.generations[child] += 1
        self._to_do = [one for one in self._to_do if one.generation == self.generations[one.child]]
        self.begin()

    def _affected(self, gone: Collection[int]) -> list[int]:
        children = [n for n, phase in enumerate(self.phases) if phase is not Phase.ENDED]
        match self.strategy:
            case Strategy.ONE:
                return [child for child in children if child in gone]
            case Strategy.REST:
                return [child for child in children if child >= min(gone)]
            case Strategy.ALL:
                return children

    def _step(self, child: int, event: str) -> None:
        self.phases[child] = TRANSITIONS[self.phases[child], event]


class Target(NamedTuple):
    """The place of a child: the worker of a name, or one of a role if the name is ""."""

    name: str
    role: str


class Candidate(NamedTuple):
    """A worker that is there."""

    name: str
    id: int
    role: str


def choose(
    target: Target, there: Iterable[Candidate], load: Mapping[str, int], last: str, *, waits: bool
) -> Candidate | None:
    """Return where a child is to be made, or None: on no worker that is there.

    A worker of the wanted name, else one of its role: the one with the fewest children, and of
    these the one with the smallest id.

    Args:
        there: those that are there.
        load: how many children each has, by name.
        last: the worker that is chosen only if there is no other: the supervisor itself.
        waits: whether the worker of the wanted name may come back.
    """
    there = list(there)
    named = [one for one in there if target.name and one.name == target.name]
    if named or (target.name and waits):
        return named[0] if named else None
    fit = [one for one in there if one.role == target.role]
    return min(fit, key=lambda one: (one.name == last, load.get(one.name, 0), one.id), default=None)
