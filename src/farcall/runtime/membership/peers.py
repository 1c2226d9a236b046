"""One other worker, as an agent sees it, and the calls between the two."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from farcall.errors import OwnerDied, PeerLost
from farcall.ids import RefId, Worker
from farcall.protocol.admission import Admission, Bounds
from farcall.protocol.outbox import Outbox
from farcall.protocol.worker import Calls
from farcall.runtime.calls.call_names import Served, readable
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.calls.outboxes import Box
from farcall.runtime.context import CallBeingServed
from farcall.runtime.membership.hosts import host_name
from farcall.serde import Only
from farcall.transport.base import Link
from farcall.wire.frames import Frame
from farcall.wire.messages import Request

L = TypeVar("L", bound=PeerLost)

NAMED_CALLS = 5  # of the calls that were in flight: how many a `PeerLost` names


class PendingCall(msgspec.Struct, eq=False, gc=False):
    """A call of ours without an outcome yet.

    Hidden from the garbage collector, which would count and visit thousands of them. So it must be
    in no cycle: its future is taken out at its end, for the future's error may lead back here.
    """

    peer: Peer
    function: str
    deadline: float
    timeout: float
    future: Future[Any] | None = None  # None if a thread waits in `Link.exchange`; or a creation
    created: RefId | None = None
    depth: int = 1  # see `function_queue`
    inherited: Served | None = None  # the deadline is that of a call being served
    call_id: int = 0
    watched: bool = False  # `CallCompletion.expire` has to be called when its deadline has passed
    sent: bool = False  # the callee may have got some of the request; of those that are watched
    is_noted: bool = False  # see `protocol.worker`: it makes a reference, or its request pins some
    handles: Sequence[object] = ()  # of the references in it that are not pinned
    recording: Callable[[], None] | None = None  # to be done when the request was sent
    method: str = ""  # see `method_of`
    parent: CallBeingServed | None = None  # the call whose function has made this one
    cancelled: bool = False  # its end was asked for

    @property
    def name(self) -> str:
        """The name of the requested function, for messages."""
        return readable(self.function, self.method)

    def fail(self, error: BaseException) -> None:
        """Fail the future, if there is one and it is not completed yet. Never raises."""
        future, self.future = self.future, None
        if future is not None:
            complete_with(future, error)


class AnsweredCall(Protocol):
    """The record of a call that a peer made here, and that has an answer."""

    @property
    def peer(self) -> Peer: ...
    @property
    def link(self) -> Link: ...
    @property
    def deadline(self) -> float:
        """`time.monotonic()` seconds."""

    def left(self, *, is_sent: bool) -> None:
        """Hear that the answer, which waited in a box, is sent, or never will be."""


class IncomingCall(AnsweredCall, Protocol):
    """The record of a call that a peer makes here. `server_call.ServerCall` serves it."""

    @property
    def frame(self) -> Frame: ...
    @property
    def request(self) -> Request: ...

    queued: int  # bytes by which it counts as queued, see `intake`

    def run_queued(self) -> None:
        """Run a call that was counted as queued."""

    def cancel(self, by_user: bool = False) -> None:
        """Stop what can be stopped: the caller gave up, or is lost, or was asked to (`by_user`)."""


class Peer:
    """One incarnation of another worker.

    `lock` guards everything but the constants and the calls, which the lock of the machine guards.
    """

    def __init__(
        self,
        worker: Worker,
        same_program: bool,
        calls: Calls[PendingCall, IncomingCall],
        bounds: Bounds = Bounds(),  # noqa: B008  # it is immutable
        only: Only | None = None,
    ) -> None:
        self.worker = worker
        self.only = only  # what it may do here; None: everything
        self.name = worker.name
        self.incarnation = worker.incarnation
        self.same_program = same_program
        self.lock = threading.Lock()
        self.outgoing = calls.outgoing
        self.incoming = calls.incoming
        self.loss_cause: str | None = None
        self.loss_told = threading.Event()  # set when all parts know of the loss
        self.refused = False  # it was lost since one of the two did not want the other
        self.left: str | None = None  # it said goodbye; links that end now are no crash
        self.linked = False  # we have dialled it
        self.outbox: Box = Outbox(bounds.in_flight_bytes)  # for the link that we dial
        self.back_outbox: Box = Outbox(bounds.in_flight_bytes)  # for `back_link`
        self.back_link: Link | None = None  # the link that it dialled
        self.admission: Admission[IncomingCall] = Admission(bounds)  # of its requests
        self.reading = threading.Lock()  # held while `back_link` is told whether it is read
        self.crowded = ""  # why it had no more threads for our calls, when it said so last
        self.crowded_at = -math.inf  # when that was, `time.monotonic()` seconds

        self._in_flight: list[str] = []  # when it was lost: what our calls had asked for

    @property
    def had_link(self) -> bool:
        """Return whether there is or was a link with it, the end of which is an event."""
        return self.linked or self.back_link is not None

    def note_loss(self, cause: str) -> None:
        """Take down that the peer is lost, and which calls that ends. With the lock held."""
        # Before the peer counts as lost: the error of a thread that sees that names these calls.
        self._in_flight = [call.name for call in self.outgoing.records()]
        self.loss_cause = cause

    def loss(self) -> PeerLost:
        """Return a new error that says how this peer was lost."""
        return self.describe(PeerLost(self.name, self._cause()))

    def owner_died(self) -> OwnerDied:
        """Return a new error for the use of a reference to a value of this peer."""
        return self.describe(OwnerDied(self.name, self._cause()))

    def _cause(self) -> str:
        return self.left or self.loss_cause or "its connection ended"

    def describe(self, error: L) -> L:
        """Add to an error the facts about this peer and the calls to it."""
        error.rank = self.worker.id
        error.host = host_name(self.worker.host)
        error.pid = self.worker.pid
        error.calls = len(self._in_flight)
        error.functions = tuple(self._in_flight[:NAMED_CALLS])
        return error
