"""Calls that this worker makes: from the function and its arguments to the outcome.

The calling thread pickles, writes its own frame and, when it waits, receives its own reply. How
calls end is in `call_completion`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from farcall.errors import (
    CallError,
    Cancelled,
    LinkError,
    NotInitialized,
    PeerLost,
    RpcTimeout,
    SerializationError,
)
from farcall.runtime.calls.call_completion import CallCompletion
from farcall.runtime.calls.future import Future, FutureOfCall, complete_with
from farcall.runtime.calls.later_calls import LaterCalls, NotKept, To, key_of
from farcall.runtime.calls.limits import CallLimits, Limit
from farcall.runtime.calls.outboxes import GRACE
from farcall.runtime.calls.pickling import Pickling
from farcall.runtime.calls.requests import IsSought, Requests
from farcall.runtime.calls.waiting_requests import WaitingRequests, of_unmade
from farcall.runtime.context import current_context, waiting
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.machine import Machine
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.peers import Peer
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.references.handles import References, RefHandle
from farcall.runtime.references.sought import SOUGHT
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor
from farcall.transport.base import Link, NotSent

Function = Callable[..., Any]
Kwargs = Mapping[str, Any]

# The time that the request of a reference has to go out, however short its timeout is, in seconds:
# the first request to a worker opens the link.
SECONDS_TO_SEND = 1.0


class CallClient:
    """The calling side of an agent. Thread-safe.

    Args:
        waiting_requests: takes the requests that can't go at once.
    """

    def __init__(
        self,
        status: Status,
        directory: Directory,
        links: Links,
        machine: Machine,
        references: References,
        completion: CallCompletion,
        gradients: DistributedGradients,
        executor: Executor,
        coordinator: ShutdownCoordinator,
        limits: CallLimits,
        pickling: Pickling,
        waiting_requests: WaitingRequests,
    ) -> None:
        self._status = status
        self._directory = directory
        self._links = links
        self._machine = machine
        self._references = references
        self._completion = completion
        self._executor = executor
        self._coordinator = coordinator
        self._limits = limits
        self._waiting_requests = waiting_requests
        self._requests = Requests(
            status, machine, references, completion, gradients, coordinator, limits, pickling
        )
        self._collecting = executor.collecting
        self._asked = machine.inquiries.open
        self._later = LaterCalls(
            machine,
            directory,
            references,
            gradients,
            pickling.serializer,
            executor,
            coordinator,
            directory.bounds.in_flight_bytes,
            self.call_async,
        )

    # Calls.

    def call(
        self,
        to: To,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """See `Agent.call`."""
        if self._collecting.thread:
            self._collecting.refuse("rpc_sync")
        limit = None
        peer = self._directory.known(to)
        if peer is None or args or self._asked or self._status.is_closed:
            peer = self._checked(peer, to, args)  # not called for most: a frame less
        if peer is None:
            peer, limit = self._look_up(to, args, timeout)
        pending, frame = self._requests.begin(peer, function, args, kwargs, timeout, limit=limit)
        link: Link | None = None
        try:
            record = pending.recording
            if record is not None:
                meanwhile = record if meanwhile is None else _both(record, meanwhile)
            context = current_context()
            if pending.parent is not None:
                sent = partial(self._completion.sent_and_awaited, pending)
                meanwhile = sent if meanwhile is None else _both(sent, meanwhile)
            if not peer.outbox.is_idle:
                self._waiting_requests.wait_for_turn(pending)
            link = self._links.connect(peer, pending.deadline)
            if context is None or not context.agent.executor.is_at_work():
                answer = link.exchange(frame, pending.deadline, meanwhile)
            else:
                with context.agent.executor.waiting():
                    answer = link.exchange(frame, pending.deadline, meanwhile)
            is_counted = self._completion.arrived(peer, answer) is not None
        except LinkError as error:
            raise self._completion.unreachable(pending, error)  # noqa: B904  # it sets the cause
        except TimeoutError as error:
            raise self._completion.give_up(pending, error) from None
        except BaseException as error:  # KeyboardInterrupt, or a frame that is too large
            may_be_sent = _may_be_sent(link is not None, error)
            self._completion.interrupted(pending, error, may_be_sent)
            raise
        if not is_counted and self._status.is_closed:
            raise self._status.ended(peer)
        # Else, if it is not: the peer was lost meanwhile, but after it had answered.
        try:
            if answer.message.references:  # type: ignore[attr-defined]
                with waiting():
                    self._completion.wait_for_references(peer, answer, pending)
            return self._completion.open(peer, answer)
        finally:
            try:
                self._coordinator.end(pending)
            except BaseException:  # KeyboardInterrupt
                self._coordinator.end(pending)
                raise

    def call_async(
        self,
        to: To,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
        maker: FrameType | None = None,
        limit: Limit | None = None,
    ) -> Future[Any]:
        """See `Agent.call_async`.

        Args:
            limit: of a call that has begun before, and was left.
        """
        if self._collecting.thread and self._collecting.defers("rpc_async"):
            return self._call_soon(to, function, args, kwargs, timeout)
        if self._executor.batch.is_on:
            self._executor.yield_to_batch()
        future: FutureOfCall[Any] = FutureOfCall(())
        future.executor = self._executor
        future.note_maker(maker or sys._getframe(2))
        try:
            peer = self._directory.known(to)
            if peer is None or args or self._asked or self._status.is_closed:
                peer = self._checked(peer, to, args)
            if peer is None:
                if self._directory.can_ask(to):
                    with contextlib.suppress(NotKept):
                        return self._leave(future, to, function, args, kwargs, timeout)
                peer, limit = self._look_up(to, args, timeout)
            pending, frame = self._requests.begin(
                peer, function, args, kwargs, timeout, future, limit=limit
            )
        except (PeerLost, RpcTimeout, Cancelled) as error:
            complete_with(future, error)
            return future
        except IsSought:
            return self._leave(future, to, function, args, kwargs, timeout, limit)
        link: Link | None = None
        is_left = False
        try:
            pending.watched = True
            if pending.deadline < self._completion.deadlines.next:
                self._completion.watch(pending)
            link = self._links.linked(peer) if peer.outbox.is_idle else None
            if link is not None:
                try:
                    link.send(frame, time.monotonic() + GRACE)
                except NotSent:
                    link = None
                except TimeoutError:
                    pass  # the rest of the frame follows when the peer reads
            if link is None:
                is_left = True
                self._waiting_requests.leave(pending, frame, pending.deadline)
            else:  # as in `CallCompletion.sent`, without a frame more for every call
                pending.sent = True
                if pending.cancelled or not pending.watched:
                    self._completion.expired(pending)
        except LinkError:
            pass  # the end of the link is an event, which ends the call
        except BaseException as error:  # KeyboardInterrupt, or a frame that is too large
            self._completion.interrupted(
                pending, error, may_be_sent=_may_be_sent(link is not None or is_left, error)
            )
            raise
        if pending.recording is not None:
            pending.recording()
        return future

    def _call_soon(self, *call: Any) -> Future[Any]:
        """`call_async` in a destructor that the garbage collector runs: another thread makes it."""
        future: FutureOfCall[Any] = FutureOfCall(())
        future.executor = self._executor
        future.note_maker(sys._getframe(2))
        self._later.soon(future, *call)
        return future

    def remote(
        self,
        to: To,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
        concurrency: int = 0,
        handle: RefHandle | None = None,
        limit: Limit | None = None,
    ) -> RefHandle:
        """See `Agent.remote`. Sending may take `SECONDS_TO_SEND`, or the timeout if longer.

        Args:
            handle: of a call that was left until its owner was known.
            limit: likewise.
        """
        if self._collecting.thread:
            self._collecting.refuse("remote")
        peer = self._checked(self._directory.known(to), to, args)
        if peer is None:
            if self._directory.can_ask(to):
                with contextlib.suppress(NotKept):
                    return self._remote_later(to, function, args, kwargs, timeout, concurrency)
            peer, limit = self._look_up(to, args, timeout)
        sequence = 0
        if handle is not None:
            sequence = self._references.found(handle, peer.worker)
        elif peer.worker is self._status.me:
            handle, _ = self._references.own()
        else:
            handle, sequence = self._references.create(peer.worker)
        try:
            pending, frame = self._requests.begin(
                peer,
                function,
                args,
                kwargs,
                timeout,
                created=handle,
                sequence=sequence,
                concurrency=concurrency,
                limit=limit,
            )
        except BaseException as error:
            self._references.never_sent(handle, of_unmade(error))
            if type(error) is IsSought:
                return self._remote_later(to, function, args, kwargs, timeout, concurrency, limit)
            # As in PyTorch: a use of the reference raises the error of the call.
            if not issubclass(type(error), CallError):
                raise
            return handle
        link: Link | None = None
        is_left = False
        try:
            self._completion.watch(pending)
            link = self._links.linked(peer) if peer.outbox.is_idle else None
            if link is not None:
                try:
                    link.send(frame, time.monotonic() + GRACE)
                except NotSent:
                    link = None
                except TimeoutError:
                    pass  # the rest follows when the owner reads; until then see `creation_late`
            if link is None:
                is_left = True
                until = max(pending.deadline, time.monotonic() + SECONDS_TO_SEND)
                self._waiting_requests.leave(pending, frame, until)
        except LinkError:
            pass  # the end of the link is an event, which ends the call
        except BaseException as error:  # KeyboardInterrupt, or a frame that is too large
            may_be_sent = _may_be_sent(link is not None or is_left, error)
            self._completion.interrupted(pending, error, may_be_sent)
            raise  # and the user never gets the reference
        if pending.recording is not None:
            pending.recording()
        return handle

    def _remote_later(
        self,
        to: To,
        function: Function,
        args: Sequence[Any],
        kwargs: Kwargs | None,
        timeout: float | None,
        concurrency: int,
        limit: Limit | None = None,
    ) -> RefHandle:
        """`remote` when what it needs is known: its callee, or the owners of its references.

        Raises:
            NotKept: the arguments can't be kept.
        """
        references = self._references
        call = self._later.keep(to, args, kwargs, limit or self._limits.of_call(timeout))
        owner = self._directory.known(to)
        is_mine = owner is not None and owner.worker is self._status.me
        call.created = handle = references.own()[0] if is_mine else references.seek(key_of(to))

        def make(peer: Peer, args: Sequence[Any], kwargs: Kwargs, limit: Limit) -> None:
            self.remote(peer, function, args, kwargs, None, concurrency, handle, limit)
            references.sent(handle, peer.worker)

        def fail(error: BaseException) -> None:
            references.never_sent(handle, of_unmade(error))

        call.make, call.fail = make, fail
        self._later.leave(call)
        return handle

    # Requests out.

    def _checked(self, peer: Peer | None, to: To, args: Sequence[Any]) -> Peer | None:
        """Return the callee of a call with these arguments, the first of which may be a reference.

        Args:
            peer: that is known by what the caller said, if there is one.
            to: a Peer in a call that has waited for it.

        Returns:
            The callee, or None if it is not known here, or calls wait that were made before.
        """
        # First: `OwnerDied` says more than that its worker is gone.
        if args and type(args[0]) is RefHandle:
            self._references.check_sendable(args[0])
        if self._status.is_closed:
            raise NotInitialized(f"the agent of {self._status.me.name!r} was shut down")
        if peer is None:
            return to if type(to) is Peer else None
        return None if self._asked and key_of(to) in self._asked else peer

    def _leave(
        self,
        future: FutureOfCall[Any],
        to: To,
        function: Function,
        args: Sequence[Any],
        kwargs: Kwargs | None,
        timeout: float | None,
        limit: Limit | None = None,
    ) -> Future[Any]:
        """`call_async` when what it needs is known.

        Raises:
            NotKept: the arguments can't be kept.
        """

        def make(peer: Peer, args: Sequence[Any], kwargs: Kwargs, limit: Limit) -> None:
            if not future.done():  # else it was cancelled
                self._later.complete(future, peer, function, args, kwargs, None, None, limit)

        try:
            call = self._later.keep(to, args, kwargs, limit or self._limits.of_call(timeout))
        except (PeerLost, RpcTimeout) as error:
            complete_with(future, error)
            return future
        call.make, call.fail = make, partial(complete_with, future)
        self._later.leave(call)
        return future

    def _look_up(self, to: To, args: Sequence[Any], timeout: float | None) -> tuple[Peer, Limit]:
        """Return a callee that is not known here, and the limit of the call, which has begun."""
        limit = self._limits.of_call(timeout)
        deadline = limit[0]
        if self._directory.can_ask(to) and key_of(to) in self._asked:
            on = args[:1] if args and type(args[0]) is RefHandle else ()
            look = partial(self._directory.look_up, to)
            with contextlib.suppress(TimeoutError):  # so that the store's silence is told
                self._references.wait_until_sent(on, deadline)
                if not on or on[0].owner != SOUGHT:
                    self._machine.inquiries.wait_behind(key_of(to), look, deadline)
            if self._status.is_closed:
                raise self._status.closed_error()
            self._references.travelling(on)  # it may have been sought in vain
        with waiting():
            return self._directory.look_up(to, deadline), limit


def _both(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


def _may_be_sent(was_begun: bool, error: BaseException) -> bool:
    """Return whether the callee may have heard of a call, or still may, that raised this.

    Args:
        was_begun: whether its request was given to a link, or left to the outbox.
    """
    # A frame that is refused for its size was neither written nor left to the outbox.
    return was_begun and not issubclass(type(error), SerializationError)
