"""The instructions of the machines of a supervision (`knowledge.py`, `leading.py`).

A worker calls functions of others: the questions here are the reasons for these calls. An
instruction brings along the function that takes the answer, or that is called when time has passed:
the owner of the machine calls it like any other event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from farcall.protocol.standing import Edition, Keeper, Number, SupervisionState
from farcall.protocol.supervision import Strategy, Target


class SupervisionPlan(NamedTuple):
    """A supervision as its user wants it.

    Attributes:
        recipe: how its children are made: opaque.
        targets: where each child is wanted.
        every: seconds between two snapshots of each child; 0: none are taken.
        wait: seconds for a worker of the wanted name to come back.
    """

    recipe: Any
    targets: Sequence[Target]
    every: Sequence[float]
    strategy: Strategy
    restarts: int
    per: float
    wait: float


class Present(NamedTuple):
    """A worker that is there.

    Attributes:
        number: its original incarnation.
        meeting: another number each time that it is lost by mistake and met again; `number` first.
    """

    name: str
    id: int
    role: str
    number: int
    meeting: int

    @property
    def keeper(self) -> Keeper:
        return self.name, self.number


class Surroundings(Protocol):
    """A worker's view of itself, the clock and the others. Asked at each event."""

    @property
    def me(self) -> Present: ...
    def now(self) -> float: ...
    def others(self) -> list[Present]: ...
    def is_usable(self, rref: Any) -> bool: ...
    def may_come(self, name: str) -> bool: ...  # a worker of that name, which is not there


# Questions.


class Adopt(NamedTuple):
    """Keep the plan, and hear of the state. Answered by a `SupervisionAnswer`."""

    plan: SupervisionPlan
    state: SupervisionState
    is_bare: bool = False


class Hear(NamedTuple):
    """Hear of a state. Answered by a `SupervisionAnswer`.

    Attributes:
        passes_on: see `Knowledge.hear`.
    """

    state: SupervisionState
    is_bare: bool = False
    passes_on: bool = False


class AskState(NamedTuple):
    """Say how a supervision is. Answered by a `SupervisionState`, or None."""

    name: str


class MakeChild(NamedTuple):
    """Make a child. Answered by a reference to it.

    Attributes:
        state: the one that counts at the supervisor, for workers that have not heard of its term.
        saved: the snapshot to make it from, with its number.
    """

    plan: SupervisionPlan
    child: int
    edition: Edition
    state: SupervisionState
    saved: tuple[Number, Any] | None


class Save(NamedTuple):
    """Read the state of the object of this reference. Answered by a snapshot."""

    plan: SupervisionPlan
    child: int
    rref: Any


class Keep(NamedTuple):
    """Keep a snapshot. The answer says nothing."""

    child: int
    number: Number
    snapshot: Any


class TellKilled(NamedTuple):
    """Hear that a user has killed a child. The answer says nothing."""

    child: int
    edition: Edition


Question = Adopt | Hear | AskState | MakeChild | Save | Keep | TellKilled


class Failed(NamedTuple):
    """The outcome of a call that has no answer.

    Attributes:
        error: why.
        may_pass: the worker was lost while it was asked, or could not take a reference: it may
            answer if it is asked again.
    """

    error: object
    may_pass: bool


# Instructions.


class Ask(NamedTuple):
    """Call a function of a worker of this name.

    Attributes:
        done: takes the answer, or a `Failed`; None: neither is of interest.
    """

    to: str
    question: Question
    done: Callable[[Any], object] | None


class After(NamedTuple):
    """Call `act` when so many seconds have passed."""

    seconds: float
    act: Callable[[], object]


class DropObjects(NamedTuple):
    """Drop these objects of this worker: others were made in place of them."""

    made: Sequence[Any]


class LetGo(NamedTuple):
    """Let go of what counts no more: users' destructors run outside every lock."""

    things: Sequence[Any]


class Started(NamedTuple):
    """Let the caller of `supervise` go on: with the error, if there is one."""

    error: Exception | None = None


class TakesOver(NamedTuple):
    """Tell the log: this worker supervises from now on."""

    names: Sequence[str]
    gone: str


class GivenUp(NamedTuple):
    """Tell the log: nothing is made again any more."""

    names: Sequence[str]
    why: str


class NotMade(NamedTuple):
    """Tell the log: a child could not be made again."""

    why: str


class NoSnapshot(NamedTuple):
    """Tell the log: no snapshot could be taken of a child."""

    name: str
    error: object


Log = TakesOver | GivenUp | NotMade | NoSnapshot
Instruction = Ask | After | DropObjects | LetGo | Started | Log
