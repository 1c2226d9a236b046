"""The plan of a supervision as it travels between workers, and the functions that it travels to.

It travels as plain tuples, as states do, so that workers with a policy take it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

from farcall.protocol.supervision import Strategy, Target
from farcall.protocol.supervision_instructions import SupervisionPlan
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

    def plan(self) -> SupervisionPlan:
        """Return it as the machines take it."""
        return SupervisionPlan(
            recipe=self,
            targets=[child.where() for child in self.children],
            every=[child.every for child in self.children],
            strategy=Strategy(self.strategy),
            restarts=self.restarts,
            per=self.per,
            wait=self.wait,
        )


def is_usable(rref: RRef[Any]) -> bool:
    """Return whether the owner of a value has not been lost, as far as is known here."""
    try:
        rref._agent.references.check_usable(rref._handle)
    except Exception:
        return False
    return True
