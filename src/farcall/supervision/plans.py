"""Messages between workers about a supervision: its plan, and its state.

Both travel as plain tuples, so that workers with a policy take them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

from farcall.protocol.succession import Edition, Keeper, Missing, Term
from farcall.protocol.supervision import Phase, Strategy, SupervisionMachine, Target
from farcall.rref import RRef

Handler = Callable[..., Any]


class Remote(NamedTuple):
    """The functions that run on other workers. See `handlers`."""

    make: Handler
    wait_until_made: Handler
    save: Handler
    keep: Handler
    adopt: Handler
    hear: Handler
    killed: Handler
    state_of: Handler


class ChildSpec(NamedTuple):
    """The recipe of a child."""

    name: str
    factory: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[str, str]  # the fields of a `Target`
    concurrency: int  # 0: any number
    every: float  # seconds between snapshots; 0: none are taken
    save: str
    load: str

    def where(self) -> Target:
        return Target(*self.target)


class Spec(NamedTuple):
    """A supervision as the user wants it. It never changes."""

    key: int  # of the supervision; unlike its names, it is never used again
    children: tuple[ChildSpec, ...]
    strategy: str
    restarts: int
    per: float
    wait: float  # seconds for a worker of the wanted name to come back

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> Self:
        """Return what another worker has sent."""
        key, children, *rest = plain
        return cls(key, tuple(ChildSpec(*child) for child in children), *rest)

    def plain(self) -> tuple[Any, ...]:
        return (self.key, tuple(tuple(child) for child in self.children), *self[2:])

    def machine(self) -> SupervisionMachine:
        strategy = Strategy(self.strategy)
        return SupervisionMachine(len(self.children), strategy, self.restarts, self.per)


class ChildState(NamedTuple):
    """The state of a child.

    Attributes:
        edition: of the object that it is, or was last, or will be next.
    """

    phase: str
    edition: Edition
    owner: str = ""  # the name of the worker that has it, or had it last
    rref: RRef[Any] | None = None  # of one that runs

    @property
    def is_running(self) -> bool:
        return self.phase == Phase.RUNNING.value

    @property
    def has_ended(self) -> bool:
        return self.phase == Phase.ENDED.value


class State(NamedTuple):
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

    def plain(self, *, is_bare: bool = False) -> tuple[Any, ...]:
        """Return it as it travels: without references that are of no use any more.

        Args:
            is_bare: without any, so that workers can take it that have not met the owners.
        """
        is_bare = is_bare or self.is_over
        children = tuple(
            (phase, tuple(edition), owner, None if is_bare else _usable(rref))
            for phase, edition, owner, rref in self.children
        )
        return (*self[:8], children)

    @property
    def term(self) -> Term:
        return self.epoch, -self.leader_id

    @property
    def order(self) -> tuple[int, int, int]:
        return *self.term, self.version

    def plus(self, other: State) -> State:
        """Return this state with what another one of the same order has beside it.

        That is a usable reference where there is none, and a keeper of which the supervisor has not
        told yet.
        """
        children = tuple(
            mine if _usable(mine.rref) else mine._replace(rref=theirs.rref)
            for mine, theirs in zip(self.children, other.children, strict=True)
        )
        keepers = tuple(dict.fromkeys([*self.keepers, *other.keepers]))
        return self._replace(keepers=keepers, children=children)

    @property
    def is_over(self) -> bool:
        return bool(self.given_up) or all(child.has_ended for child in self.children)


class Answer(NamedTuple):
    """The answer of a worker that hears a state.

    Attributes:
        other: the state that counts there in its place.
        missing: what should run there as it says, and does not.
    """

    other: State | None = None
    missing: tuple[Missing, ...] = ()

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> Self:
        """Return what another worker has sent."""
        other, missing = plain
        found = tuple(Missing(child, Edition(*edition), was) for child, edition, was in missing)
        return cls(None if other is None else State.of(other), found)

    def plain(self) -> tuple[Any, ...]:
        """Return it as it travels, for workers that have not met all owners, too."""
        other = None if self.other is None else self.other.plain(is_bare=True)
        return other, tuple((child, tuple(edition), was) for child, edition, was in self.missing)


def _usable(rref: RRef[Any] | None) -> RRef[Any] | None:
    return rref if rref is not None and is_usable(rref) else None


def is_usable(rref: RRef[Any]) -> bool:
    """Return whether the owner of a value has not been lost, as far as is known here."""
    try:
        rref._agent.references.check_usable(rref._handle)
    except Exception:
        return False
    return True
