"""Calls that this worker makes: from the function and its arguments to the outcome.

The calling thread pickles, writes its own frame and, when it waits, receives its own reply. How
calls end is in `call_completion`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from farcall.errors import (
    CallError,
    LinkError,
    NotInitialized,
    PeerLost,
    RpcTimeout,
    SerializationError,
)
from farcall.ids import WorkerInfo
from farcall.protocol.worker import WorkerMachine
from farcall.runtime.calls.call_completion import CallCompletion
from farcall.runtime.calls.call_names import OF_METHODS, method_of
from farcall.runtime.calls.future import Future, FutureOfCall
from farcall.runtime.calls.later_calls import LaterCalls
from farcall.runtime.calls.limits import Limits
from farcall.runtime.calls.outboxes import GRACE
from farcall.runtime.calls.pickling import Pickling
from farcall.runtime.calls.waiting_requests import WaitingRequests, of_unmade
from farcall.runtime.context import current_context, waiting
from farcall.runtime.gradients import Gradients
from farcall.runtime.machine import Machine
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.peers import Peer, PendingCall
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.references.handles import References, RefHandle
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor
from farcall.transport.base import Link, NotSent
from farcall.wire.frames import Frame
from farcall.wire.messages import Request

To = str | int | WorkerInfo
Function = Callable[..., Any]
Kwargs = Mapping[str, Any]

# What the request of a reference has to go out, however short its timeout is, in seconds: the
# first one to a worker opens the link.
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
        gradients: Gradients,
        executor: Executor,
        coordinator: ShutdownCoordinator,
        limits: Limits,
        pickling: Pickling,
        waiting_requests: WaitingRequests,
    ) -> None:
        self._status = status
        self._directory = directory
        self._links = links
        self._machine = machine
        self._references = references
        self._completion = completion
        self._gradients = gradients
        self._executor = executor
        self._coordinator = coordinator
        self._limits = limits
        self._pickling = pickling
        self._waiting_requests = waiting_requests
        self._collecting = executor.collecting
        self._later = LaterCalls(
            machine, directory, pickling.serializer, executor, coordinator, self.call_async
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
        peer = self._known(to, args) or self._look_up(to, timeout)
        pending, frame = self._request(peer, function, args, kwargs, timeout)
        link: Link | None = None
        try:
            record = pending.recording
            if record is not None:
                meanwhile = record if meanwhile is None else _both(record, meanwhile)
            context = current_context()
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
            raise self._completion.unreachable(pending, error) from error
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
    ) -> Future[Any]:
        """See `Agent.call_async`."""
        if self._collecting.thread and self._collecting.is_here:
            return self._call_soon(to, function, args, kwargs, timeout)
        executor = self._executor
        if executor.row.is_on:
            executor.let_complete()
        future: FutureOfCall[Any] = FutureOfCall(())
        future.executor = executor
        future.note_maker(maker or sys._getframe(2))
        try:
            peer = self._known(to, args)
            if peer is None:
                if self._is_left(future, to, function, args, kwargs, timeout):
                    return future
                peer = self._look_up(to, timeout)
            pending, frame = self._request(peer, function, args, kwargs, timeout, future)
        except (PeerLost, RpcTimeout) as error:
            future.set_exception(error)
            return future
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
                if not pending.watched:
                    self._completion.expired(pending)
        except LinkError as error:
            self._completion.unreachable(pending, error)
        except BaseException as error:  # KeyboardInterrupt, or a frame that is too large
            may_be_sent = _may_be_sent(link is not None or is_left, error)
            self._completion.interrupted(pending, error, may_be_sent)
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
    ) -> RefHandle:
        """See `Agent.remote`. Sending may take `SECONDS_TO_SEND`, or the timeout if longer."""
        if self._collecting.thread:
            self._collecting.refuse("remote")
        peer = self._known(to, args) or self._look_up(to, timeout)
        if peer.worker is self._status.me:
            handle, _ = self._references.own()
            sequence = 0
        else:
            handle, sequence = self._references.create(peer.worker)
        try:
            pending, frame = self._request(
                peer, function, args, kwargs, timeout, created=handle, sequence=sequence
            )
        except BaseException as error:
            self._references.never_sent(handle.ref, of_unmade(error))
            # As in PyTorch: what happens to the call is told to whoever uses the reference.
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
        except LinkError as error:
            ended = self._completion.unreachable(pending, error)
            self._references.creation_failed(handle.ref, of_unmade(ended))
        except BaseException as error:  # KeyboardInterrupt, or a frame that is too large
            may_be_sent = _may_be_sent(link is not None or is_left, error)
            self._completion.interrupted(pending, error, may_be_sent)
            raise  # and nobody gets the reference
        if pending.recording is not None:
            pending.recording()
        return handle

    # Requests out.

    def _known(self, to: To, args: Sequence[Any]) -> Peer | None:
        """The callee of a call with these arguments, the first of which may be a reference.

        Returns:
            The callee, or None if it is not known here.
        """
        # First: `OwnerDied` says more than that its worker is gone.
        if args and type(args[0]) is RefHandle:
            self._references.check_sendable(args[0])
        if self._status.is_closed:
            raise NotInitialized(f"the agent of {self._status.me.name!r} was shut down")
        return self._directory.known(to)

    def _is_left(
        self,
        future: FutureOfCall[Any],
        to: To,
        function: Function,
        args: Sequence[Any],
        kwargs: Kwargs | None,
        timeout: float | None,
    ) -> bool:
        """Whether a call is left until the store has said where its callee is.

        An autograd context records what is sent, so a call in one waits for that itself.
        """
        context = current_context()
        if not self._directory.can_ask(to) or (context is not None and context.gradients):
            return False
        limit = self._limits.of_call(timeout)[:2]
        return self._later.when_known(future, to, function, args, kwargs, limit)

    def _look_up(self, to: To, timeout: float | None) -> Peer:
        deadline, _, _ = self._limits.of_call(timeout)
        with waiting():
            return self._directory.look_up(to, deadline)

    def _request(
        self,
        peer: Peer,
        function: Function,
        args: Sequence[Any],
        kwargs: Kwargs | None,
        timeout: float | None,
        future: Future[Any] | None = None,
        created: RefHandle | None = None,
        sequence: int = 0,
    ) -> tuple[PendingCall, Frame]:
        """A request that is counted as begun, and its frame."""
        on: Sequence[RefHandle] = ()
        if args and type(args[0]) is RefHandle:
            on = args[:1]
        name, dumped = self._pickling.dump_call(peer, function, args, kwargs or {}, len(on))
        handles = (*on, *dumped.references) if on else dumped.references
        # Only now: pickling may take any time, and is not remote.
        deadline, seconds, inherited = self._limits.of_call(timeout)
        context = current_context()
        depth = 1 if context is None else context.depth + 1
        created_ref = None if created is None else created.ref
        pending = PendingCall(peer, name, deadline, seconds, future, created_ref, depth, inherited)
        if name in OF_METHODS:
            pending.method = method_of(name, args)
        references = tuple([handle.reference for handle in handles]) if handles else ()
        needs_pins = False
        if references or created is not None:
            creates = created is not None
            needs_pins = WorkerMachine.needs_pins(references, peer.incarnation, creates=creates)
            if needs_pins:  # assigned only then: that takes as long as a small call of Python
                pending.is_noted = True
                if references:
                    self._wait_until_confirmed(handles, pending)
        try:
            self._coordinator.begin(pending)
            call_id = pending.call_id = peer.outgoing.begin(pending)
            # After that: a peer that is lost from now on finds the call there, and fails it.
            if peer.lost is not None and peer.outgoing.outcome(call_id) is not None:
                raise peer.loss()
            request = Request(name, 0.0 if created else seconds, depth=depth)
            if context is not None and context.gradients:
                request.no_grad = not torch.is_grad_enabled()
                gradients = self._gradients
                tensors = dumped.tensors
                # Who waits for the answer records before, and changes nothing meanwhile.
                waits = future is None and created is None
                sent = gradients.send(context.gradients, peer, tensors, waits)
                request.context, request.sent = sent
                if request.sent:
                    pending.recording = partial(gradients.record, request.context, request.sent)
            elif dumped.tensors and self._status.advice.pending and torch.is_grad_enabled():
                self._status.advice.warn_of_gradients(peer.name, name)
            if created is not None:
                request.creates, request.sequence = created.reference.number, sequence
            if handles:
                request.references, request.on_reference = references, bool(on)
                if needs_pins:
                    self._references.pin(peer.incarnation, call_id, handles)
                else:
                    # Until it answers, the callee's values are kept by our own use of them.
                    pending.handles = handles
            return pending, Frame(request, call_id, dumped.body, dumped.buffers)
        except BaseException as error:  # KeyboardInterrupt
            self._completion.interrupted(pending, error, may_be_sent=False)
            raise

    def _wait_until_confirmed(self, handles: Sequence[RefHandle], pending: PendingCall) -> None:
        refs = [handle.ref for handle in handles]
        callee = pending.peer.incarnation
        try:
            self._machine.wait_until_confirmed(refs, callee, pending.deadline)
        except TimeoutError:
            raise self._completion.timeout(pending) from None


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
    # What refuses a frame for its size has written nothing of it, and left nothing.
    return was_begun and not issubclass(type(error), SerializationError)
