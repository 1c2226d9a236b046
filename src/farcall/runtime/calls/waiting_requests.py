"""Requests that can't go at once, since their callee has no link yet or does not read: they wait in
its outbox, in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farcall.errors import (
    AuthenticationFailed,
    BadFrame,
    Cancelled,
    FarcallError,
    LinkError,
)
from farcall.runtime.calls.call_completion import CallCompletion
from farcall.runtime.calls.outboxes import Outboxes, Turn, detached, size_of
from farcall.runtime.context import waiting
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.peers import PendingCall
from farcall.runtime.references.handles import References
from farcall.runtime.threads.executor import Executor
from farcall.serde import message_of
from farcall.transport.base import Link, NotSent
from farcall.wire.frames import Frame, check_size
from farcall.wire.messages import encode_message


class WaitingRequests:
    """Leaves the requests of an agent to its outboxes, and sends them from there. Thread-safe."""

    def __init__(
        self,
        links: Links,
        outboxes: Outboxes,
        executor: Executor,
        references: References,
        completion: CallCompletion,
    ) -> None:
        self._links = links
        self._outboxes = outboxes
        self._executor = executor
        self._references = references
        self._completion = completion

    def leave(self, pending: PendingCall, frame: Frame, until: float) -> None:
        """Leave a request to the box of its callee. Waits only if the box is full.

        Args:
            pending: the call. If there is no room in time, it is ended.
            frame: its request. It may refer to memory of the user's.
            until: when it must have been sent, `time.monotonic()` seconds.

        Raises:
            SerializationError: the frame is larger than a peer takes. It is not left.
        """
        try:
            check_size(
                frame.message, len(encode_message(frame.message)), len(frame.body), frame.buffers
            )
            request = _WaitingRequest(self, pending, detached(frame), until)
            with waiting():
                self._outboxes.put(pending.peer.outbox, request, until)
        except NotSent as error:
            self._could_not_send(pending, error)

    def wait_for_turn(self, pending: PendingCall) -> None:
        """Wait until all earlier frames for the callee are sent.

        Raises:
            NotSent: it is not by the call's deadline.
        """
        turn = Turn()
        with waiting():
            self._outboxes.put(pending.peer.outbox, turn, pending.deadline)
            turn.wait(pending.deadline)

    def send(self, pending: PendingCall, frame: Frame, until: float) -> None:
        """Send a request whose turn has come; dials its callee if need be."""
        link: Link | None = None
        try:
            link = self._links.connect(pending.peer, until)
            if is_over(pending):
                self.drop(pending)
                return
            link.send(frame, until)
            self._completion.sent(pending)
        except (AuthenticationFailed, BadFrame) as error:  # which are no death
            self._elsewhere(pending, partial(self._unreachable, pending, error))
        except LinkError as error:
            self._unreachable(pending, error)
        except NotSent as error:
            self._elsewhere(pending, partial(self._could_not_send, pending, error))
        except TimeoutError as error:
            if pending.created is None:
                self._elsewhere(pending, partial(self._give_up, pending, error))
            # Else the rest follows when the owner reads; `creation_late` says so until then.
        except BaseException as error:
            self._completion.interrupted(pending, error, may_be_sent=link is not None)
            raise

    def _unreachable(self, pending: PendingCall, error: LinkError) -> None:
        ended = self._completion.unreachable(pending, error)
        if pending.created is not None:
            self._references.creation_failed(pending.created, of_unmade(ended))

    def _give_up(self, pending: PendingCall, error: TimeoutError) -> None:
        self._completion.give_up(pending, error)

    def _elsewhere(self, pending: PendingCall, end: Callable[[], None]) -> None:
        """End a call, but not in this thread if its future has callbacks: these may call the same
        worker, and would wait for what only this thread sends.
        """
        if pending.future is None or not pending.future._callbacks:
            end()
        else:
            self._executor.submit(end, pending.depth + 1)

    def drop(self, pending: PendingCall) -> None:
        """Drop a request that waited, since its call is over."""
        # Else a CANCEL is on its way, whose answer makes the id free again.
        if not pending.sent:
            self._completion.withdraw(pending, "its call was given up")

    def _could_not_send(self, pending: PendingCall, error: NotSent) -> None:
        """End a request of which nothing was written, since no time is left."""
        ended = self._completion.give_up(pending, error)
        if pending.created is not None:
            self._references.creation_failed(pending.created, ended)


class _WaitingRequest:
    """The request of one call. See `outboxes.Waiting`."""

    __slots__ = ("_frame", "_pending", "_requests", "_until", "size")

    def __init__(
        self, requests: WaitingRequests, pending: PendingCall, frame: Frame, until: float
    ) -> None:
        self._requests = requests
        self._pending = pending
        self._frame = frame
        self._until = until
        self.size = size_of(frame)

    @property
    def is_over(self) -> bool:
        return is_over(self._pending)

    def send(self) -> None:
        if self.is_over:
            self.drop()
        else:
            self._requests.send(self._pending, self._frame, self._until)

    def drop(self) -> None:
        self._requests.drop(self._pending)


def is_over(pending: PendingCall) -> bool:
    """Return whether a call whose request was not sent has ended."""
    return pending.peer.outgoing.peek(pending.call_id) is not pending


def of_unmade(error: BaseException) -> FarcallError:
    """Return what use of a reference raises whose `remote()` call failed so."""
    # By `type`, since the `__class__` of a user's error may raise.
    return error if issubclass(type(error), FarcallError) else Cancelled(message_of(error))  # type: ignore[return-value]
