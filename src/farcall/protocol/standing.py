"""The state of a supervision, as it travels between workers, and which of two states counts.

Workers that lose each other may each supervise: in each half of a group a worker takes over from
those that it can't reach. The time in which one worker supervises is a *term*. Of two terms the one
with the higher epoch counts, then that of the smaller id. A supervisor that takes over has an epoch
of one more than the last that it has heard of. A state says how things are in a term.

An object is an *edition* of a child: the term of the supervisor that has it made, and a generation.
Two halves count generations each for itself, so that a generation alone says nothing.

States travel as plain tuples, so that workers with a policy take them. References to the objects
are opaque here: the owner of a machine says whether one is of any use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

from farcall.protocol.supervision import Phase

Term = tuple[int, int]  # an epoch, and minus the id of the supervisor: the larger one counts
Number = tuple[int, int, int, int]  # of a snapshot: a term, the generation, and how many before it
Keeper = tuple[str, int]  # a worker by name and original incarnation
Usable = Callable[[Any], bool]  # whether the owner of a reference has not been lost here


class Edition(NamedTuple):
    """The identity of an object: a child, as one supervisor has it made."""

    epoch: int
    rank: int  # minus the id of the supervisor
    generation: int

    @property
    def term(self) -> Term:
        return self.epoch, self.rank


class Missing(NamedTuple):
    """A child that runs on a worker as a state has it, and is not there."""

    child: int
    edition: Edition
    was_killed: bool  # by a user


class ChildState(NamedTuple):
    """The state of a child.

    Attributes:
        edition: of the object that it is, or was last, or will be next.
    """

    phase: str
    edition: Edition
    owner: str = ""  # the name of the worker that has it, or had it last
    rref: Any = None  # a reference to one that runs

    @property
    def is_running(self) -> bool:
        return self.phase == Phase.RUNNING.value

    @property
    def has_ended(self) -> bool:
        return self.phase == Phase.ENDED.value

    def has_usable(self, is_usable: Usable) -> bool:
        """Return whether there is a reference of which the owner has not been lost."""
        return self.rref is not None and is_usable(self.rref)


class SupervisionState(NamedTuple):
    """The state of a supervision. Of two that a worker hears, that with the larger `order` counts.

    Attributes:
        epoch: how many workers have supervised so far.
        leader_id: the id of the one that does now.
        version: one more for each change in an epoch.
        keepers: those that can take over, in that order. The first supervises.
        ages: how many seconds ago the restarts were that count.
        given_up: why; "" if it was not.
    """

    key: int
    names: tuple[str, ...]
    epoch: int
    leader_id: int
    version: int
    keepers: tuple[Keeper, ...]
    ages: tuple[float, ...]
    given_up: str
    children: tuple[ChildState, ...]

    @classmethod
    def first(cls, key: int, names: tuple[str, ...], keeper: Keeper, leader_id: int) -> Self:
        """Return the state in which a worker begins to supervise."""
        child = ChildState(Phase.WAITING.value, Edition(1, -leader_id, 1))
        return cls(key, names, 1, leader_id, 0, (keeper,), (), "", (child,) * len(names))

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> Self:
        """Return what another worker has sent."""
        key, names, epoch, leader_id, version, keepers, ages, given_up, children = plain
        keeping = tuple((name, number) for name, number in keepers)
        states = tuple(
            ChildState(phase, Edition(*edition), owner, rref)
            for phase, edition, owner, rref in children
        )
        return cls(
            *(key, tuple(names), epoch, leader_id, version),
            keeping,
            tuple(ages),
            given_up,
            states,
        )

    def plain(self, is_usable: Usable) -> tuple[Any, ...]:
        """Return it as it travels: without references that are of no use any more."""
        if self.is_over:
            return self.bare()
        children = tuple(
            (phase, tuple(edition), owner, rref if rref is not None and is_usable(rref) else None)
            for phase, edition, owner, rref in self.children
        )
        return (*self[:8], children)

    def bare(self) -> tuple[Any, ...]:
        """Return it without references, for workers that have not met the owners."""
        children = tuple(
            (phase, tuple(edition), owner, None) for phase, edition, owner, _ in self.children
        )
        return (*self[:8], children)

    @property
    def term(self) -> Term:
        return self.epoch, -self.leader_id

    @property
    def order(self) -> tuple[int, int, int]:
        return *self.term, self.version

    def plus(self, other: SupervisionState, is_usable: Usable) -> SupervisionState:
        """Return this state with what another one of the same order has beside it.

        That is a usable reference where there is none, and a keeper of which the supervisor has not
        told yet.
        """
        children = tuple(
            mine if mine.has_usable(is_usable) else mine._replace(rref=theirs.rref)
            for mine, theirs in zip(self.children, other.children, strict=True)
        )
        keepers = tuple(dict.fromkeys([*self.keepers, *other.keepers]))
        return self._replace(keepers=keepers, children=children)

    @property
    def is_over(self) -> bool:
        return bool(self.given_up) or all(child.has_ended for child in self.children)

    @property
    def all_run(self) -> bool:
        return all(child.is_running for child in self.children)


class SupervisionAnswer(NamedTuple):
    """The answer of a worker that hears a state.

    Attributes:
        other: the state that counts there in its place.
        missing: what should run there as it says, and does not.
    """

    other: SupervisionState | None = None
    missing: tuple[Missing, ...] = ()

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> Self:
        """Return what another worker has sent."""
        other, missing = plain
        found = tuple(Missing(child, Edition(*edition), was) for child, edition, was in missing)
        return cls(None if other is None else SupervisionState.of(other), found)

    def plain(self) -> tuple[Any, ...]:
        """Return it as it travels, for workers that have not met all owners, too."""
        other = None if self.other is None else self.other.bare()
        return other, tuple((child, tuple(edition), was) for child, edition, was in self.missing)
