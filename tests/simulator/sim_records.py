"""The parts of a simulated worker, and its records of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from farcall.ids import RefId, original
from farcall.protocol.calls import Incoming, Outgoing
from farcall.protocol.instructions import Answer, Follow, Send
from farcall.protocol.refs import Refs
from farcall.protocol.worker import WorkerMachine
from farcall.wire.messages import Reference, Request

SendMessage = Callable[[int, Send | Follow | Answer], None]  # from whom, what


class Machines(NamedTuple):
    """The classes a worker is made of; a planted bug replaces one."""

    worker: type[WorkerMachine[Any, Any]] = WorkerMachine
    refs: type[Refs] = Refs
    outgoing: type[Outgoing[Any]] = Outgoing
    incoming: type[Incoming[Any]] = Incoming


class Handle(NamedTuple):
    """A reference as user code has it: what a `RefHandle` is to an agent.

    Attributes:
        ref: which.
        owner: the incarnation that its owner had here when it arrived, see REF-5.
        owner_name: for the log.
    """

    ref: RefId
    owner: int
    owner_name: str

    @classmethod
    def of(cls, reference: Reference) -> Handle:
        """Return the handle for a reference that arrived."""
        ref = RefId(reference.minted_by, reference.number)
        return cls(ref, reference.owner, reference.owner_name)

    @property
    def on_wire(self) -> Reference:
        """The reference as it travels."""
        return Reference(*self.ref, original(self.owner), self.owner_name, 0)


class Call:
    """A call made from here: what `PendingCall` is to an agent."""

    __slots__ = ("call_id", "cancelled", "created", "is_noted", "kept", "sent")

    def __init__(self, created: RefId | None) -> None:
        self.call_id = 0
        self.created = created
        self.is_noted = created is not None
        self.cancelled = False
        self.sent = False
        self.kept: Sequence[Handle] = ()  # used once more each until the call ends


class Task:
    """A call that is queued or running here: what a `Job` is to an agent."""

    __slots__ = (
        "arguments",
        "call_id",
        "caller",
        "has_uses",
        "is_deferred",
        "is_over",
        "is_started",
        "request",
    )

    def __init__(self, caller: int, call_id: int, request: Request) -> None:
        self.caller = caller
        self.call_id = call_id
        self.request = request
        # Its function returns a future, and runs no more after that.
        self.is_deferred = call_id % 3 == 0
        self.is_started = False
        self.is_over = False  # answered, or its caller is lost
        self.has_uses = False  # each reference of its request is used once more: all live here
        self.arguments: list[Handle] = []

    @property
    def is_creation(self) -> bool:
        return self.request.creates != b""
