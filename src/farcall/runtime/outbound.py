"""Calls that this worker makes: from the function and its arguments to the outcome.

The calling thread pickles, writes its own frame and, when it waits, receives its own reply. Every
call that was begun ends once: by the answer, by `give_up` (time), by `unreachable` (its link), or
by `Agent.lose` (its peer); the `Outgoing` machine of the peer decides which was first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farcall.errors import (
    AuthenticationFailed,
    BadFrame,
    CallError,
    Cancelled,
    LinkError,
    NotInitialized,
    OwnerDied,
    PeerLost,
    RpcTimeout,
    SerializationError,
)
from farcall.ids import RefId, WorkerInfo
from farcall.protocol.ref_entries import TransferKey
from farcall.runtime.context import current
from farcall.runtime.future import Future
from farcall.runtime.peers import Peer, PendingCall
from farcall.runtime.references import RefHandle, references_of
from farcall.serde import Dumped, load_failure, name_of
from farcall.transport.base import Link, NotSent
from farcall.transport.waiter import Waiter
from farcall.wire import Accepted, Cancel, Failure, Frame, Reply, Request

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent

To = str | int | WorkerInfo
Function = Callable[..., Any]
Kwargs = Mapping[str, Any]

# How farcall's own handlers are called in messages.
_OWN_NAMES = {
    "farcall.rref:fetch": "to_here",
    "farcall.rref:type_of": "the type of a remote value",
    "farcall.rref:call_method": "a method of a remote value",
}


class Outbound:
    """The calling side of an agent. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._references = agent.references
        self._deadlines = agent.deadlines

    # Calls.

    def call(
        self,
        to: To,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Run a function on another worker (or this one) and wait for its value.

        Raises:
            RpcTimeout, PeerLost, Cancelled, SerializationError: see `farcall.errors`.
            The exception that the function raised, if it raised one.
        """
        peer = self._peer(to)
        pending, frame = self._request(peer, function, args, kwargs, timeout)
        try:
            link = self._connect(peer, pending.deadline)
            with self._agent.waiting():
                answer = link.exchange(frame, pending.deadline)
        except LinkError as error:
            raise self._unreachable(peer, frame.call_id, pending, error) from error
        except TimeoutError as error:
            raise self._give_up(peer, frame.call_id, pending, error) from None
        except BaseException as error:  # KeyboardInterrupt
            self._give_up(peer, frame.call_id, pending, error)
            raise
        if self._outcome(peer, frame.call_id) is None:
            raise peer.loss()
        if answer.message.references:  # type: ignore[attr-defined]
            with self._agent.waiting():
                self._wait_for_references(peer, answer)
        return self._open(peer, answer)

    def call_async(
        self,
        to: To,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
    ) -> Future[Any]:
        """Like `call`, with a future of the value. Raises only what is wrong with the arguments."""
        future: Future[Any] = Future()
        future.note_maker()
        try:
            peer = self._peer(to)
            pending, frame = self._request(peer, function, args, kwargs, timeout, future)
        except (PeerLost, RpcTimeout) as error:
            future.set_exception(error)
            return future
        self._watch_deadline(pending.deadline, (peer, frame.call_id, None))
        try:
            self._connect(peer, pending.deadline).send(frame, pending.deadline)
        except LinkError as error:
            future_error = self._unreachable(peer, frame.call_id, pending, error)
            if not future.done():
                future.set_exception(future_error)
        except TimeoutError as error:
            timed_out = self._give_up(peer, frame.call_id, pending, error)
            if not future.done():
                future.set_exception(timed_out)
        return future

    def remote(
        self,
        to: To,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        timeout: float | None = None,
    ) -> RefHandle:
        """Run a function elsewhere and leave its result there: a handle of it, at once."""
        peer = self._peer(to)
        if peer.worker is self._agent.me:
            handle, _ = self._references.own()
            sequence = 0
        else:
            handle, sequence = self._references.create(peer.worker)
        try:
            self._send_creation(peer, function, args, kwargs, timeout, handle, sequence)
        except CallError as error:
            self._references.creation_failed(handle.ref, error)
            raise
        except BaseException as error:
            self._references.creation_failed(handle.ref, Cancelled(str(error)))
            raise
        return handle

    def _send_creation(
        self,
        peer: Peer,
        function: Function,
        args: Sequence[Any],
        kwargs: Kwargs | None,
        timeout: float | None,
        handle: RefHandle,
        sequence: int,
    ) -> None:
        pending, frame = self._request(
            peer, function, args, kwargs, timeout, created=handle, sequence=sequence
        )
        self._watch_deadline(pending.deadline, (peer, frame.call_id, handle.ref))
        try:
            self._connect(peer, pending.deadline).send(frame, pending.deadline)
        except LinkError as error:
            raise self._unreachable(peer, frame.call_id, pending, error) from error
        except NotSent as error:
            raise self._give_up(peer, frame.call_id, pending, error) from None
        except TimeoutError:
            pass  # the rest follows when the owner reads; `creation_late` says so until then

    # Requests out.

    def _peer(self, to: To) -> Peer:
        if self._agent.is_closed:
            raise NotInitialized(f"the agent of {self._agent.me.name!r} was shut down")
        return self._agent.directory.resolve(to)

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
        deadline, seconds = self.deadline(timeout)
        handles: list[RefHandle] = []
        name, dumped = self._dump_call(peer, function, args, kwargs or {}, handles)
        pending = PendingCall(name, deadline, seconds, future, created.ref if created else None)
        if handles:
            self._wait_until_accepted(peer, handles, pending)
        with peer.lock:
            if peer.lost is not None:
                raise peer.loss()
            call_id = peer.outgoing.begin(pending)
        self._agent.leaver.begin()
        request = Request(name, 0.0 if created else seconds)
        if created is not None:
            request.creates, request.sequence = created.reference.number, sequence
        if handles:
            pending.pinned = True
            request.references = references_of(handles)
            self._references.pin(TransferKey(peer.incarnation, call_id, False), handles)
        return pending, Frame(request, call_id, dumped.body, dumped.buffers)

    def _wait_until_accepted(
        self, peer: Peer, handles: Sequence[RefHandle], pending: PendingCall
    ) -> None:
        try:
            self._references.wait_until_accepted(handles, peer.incarnation, pending.deadline)
        except TimeoutError:
            raise self._timeout(peer, pending) from None

    def deadline(self, timeout: float | None) -> tuple[float, float]:
        """When a call that begins now must end: `time.monotonic()` seconds, and seconds from now.

        A call made by a handler has at most what is left to the call that the handler serves.

        Raises:
            RpcTimeout: nothing is left.
        """
        seconds = self._agent.rpc_timeout if timeout is None else timeout
        now = time.monotonic()
        deadline = now + seconds if seconds else math.inf
        context = current.get()
        if context is not None and context.deadline < deadline:
            deadline, seconds = context.deadline, context.deadline - now
            if seconds <= 0:
                raise RpcTimeout("the call that makes this call has passed its deadline")
        return deadline, seconds

    def _dump_call(
        self,
        peer: Peer,
        function: Function,
        args: Sequence[Any],
        kwargs: Kwargs,
        handles: list[RefHandle],
    ) -> tuple[str, Dumped]:
        name = name_of(function)
        if name is not None and (peer.same_program or not name.startswith("__main__:")):
            value: tuple[Any, ...] = (tuple(args), kwargs)
        else:
            name, value = "", (function, tuple(args), kwargs)
        try:
            return name, self._agent.dump(value, peer, handles)
        except SerializationError as error:
            raise self._agent.serializer.explain_unpicklable(
                name or getattr(function, "__qualname__", repr(function)),
                args if name else (function, *args),
                kwargs,
                error,
                externals=self._references.collector([]),
                by_value=not peer.same_program,
                device_map=self._agent.device_maps.get(peer.name),
            ) from error

    def _connect(self, peer: Peer, deadline: float) -> Link:
        if peer.worker is self._agent.me:
            return self._agent.loopback
        return self._agent.endpoint.connect(peer.worker, deadline)

    def _watch_deadline(self, deadline: float, key: tuple[Peer, int, Any]) -> None:
        if self._deadlines.add(deadline, key):
            self._agent.endpoint.wake()

    # How calls end.

    def _unreachable(
        self, peer: Peer, call_id: int, pending: PendingCall, error: LinkError
    ) -> Exception:
        """The link failed before or while the call was made: what the call ends with."""
        if self._retract(peer, call_id) and time.monotonic() >= pending.deadline:
            return self._timeout(peer, pending)
        if self._agent.is_closed:
            return Cancelled(f"the agent of {self._agent.me.name!r} was shut down")
        if isinstance(error, AuthenticationFailed | BadFrame):
            return error
        self._agent.lose(peer, str(error))
        return peer.loss()

    def _give_up(
        self, peer: Peer, call_id: int, pending: PendingCall, error: BaseException
    ) -> RpcTimeout:
        if isinstance(error, NotSent):
            self._retract(peer, call_id)
        else:
            self._abandon(peer, call_id)
        return self._timeout(peer, pending)

    def _retract(self, peer: Peer, call_id: int) -> bool:
        """The request was not sent. False: the call had ended already."""
        with peer.lock:
            pending = peer.outgoing.retract(call_id)
        self._references.unpin(TransferKey(peer.incarnation, call_id, False))
        if pending is not None:
            self._end(peer, call_id, pending)
        return pending is not None

    def _end(self, peer: Peer, call_id: int, pending: PendingCall) -> None:
        """We gave up on a call: tell the callee, if its link takes that at once, else later."""
        self._forget_deadline(peer, call_id, pending)
        if peer.lost is None:
            self.send_cancel(peer, call_id)
        self._agent.leaver.end()

    def send_cancel(self, peer: Peer, call_id: int) -> None:
        try:
            self._connect(peer, 0.0).send(Frame(Cancel(), call_id), 0.0)
        except TimeoutError:
            self._agent.repeat_later()
        except LinkError:
            pass

    def _abandon(self, peer: Peer, call_id: int) -> PendingCall | None:
        """Give up on a call and tell the callee. None: it had ended already."""
        with peer.lock:
            pending = peer.outgoing.abandon(call_id)
        if pending is not None:
            self._end(peer, call_id, pending)
        return pending

    def _forget_deadline(self, peer: Peer, call_id: int, pending: PendingCall) -> None:
        if pending.future is not None or pending.created is not None:
            self._deadlines.discard(pending.deadline, (peer, call_id, pending.created))

    def _timeout(self, peer: Peer, pending: PendingCall) -> RpcTimeout:
        what = _OWN_NAMES.get(pending.function, pending.function) or "a function sent by value"
        return RpcTimeout(
            f"RPC ran for more than set timeout ({pending.timeout * 1000:.0f} ms): "
            f"{what} on worker {peer.name!r}"
        )

    def _outcome(self, peer: Peer, call_id: int) -> PendingCall | None:
        """The answer of a call arrived. None: it had ended already."""
        with peer.lock:
            pending = peer.outgoing.outcome(call_id)
        if pending is None or pending.pinned:
            self._references.call_closed(TransferKey(peer.incarnation, call_id, False))
        if pending is not None:
            self._forget_deadline(peer, call_id, pending)
            self._agent.leaver.end()
        return pending

    def on_answer(self, peer: Peer, answer: Frame) -> None:
        """An answer arrived that no thread waits for."""
        pending = self._outcome(peer, answer.call_id)
        message = answer.message
        if isinstance(message, Accepted):
            if pending is not None and pending.created is not None:
                self._references.accepted(pending.created)
            return
        assert isinstance(message, Reply | Failure)
        if pending is None:
            if message.references:
                self._references.asked(TransferKey(peer.incarnation, answer.call_id, True))
        elif pending.created is not None:
            cause = Cancelled(f"worker {peer.name!r} did not make the value: {message}")
            self._references.creation_failed(pending.created, cause)
        elif message.references:
            self._arrive(peer, answer, lambda error: self._complete(peer, answer, pending, error))
        else:
            self._complete(peer, answer, pending, None)

    def _complete(
        self, peer: Peer, answer: Frame, pending: PendingCall, error: OwnerDied | None
    ) -> None:
        future = pending.future
        self._agent.executor.may_pass_lead()
        try:
            if error is not None:
                raise error
            value = self._open(peer, answer)
        except BaseException as failure:
            if future is not None:
                future.set_exception(failure)
        else:
            if future is not None:
                future.set_result(value)

    def expire(self, peer: Peer, call_id: int, created: RefId | None) -> None:
        """The deadline of an asynchronous call passed."""
        self._agent.executor.may_pass_lead()
        if created is None:
            pending = self._abandon(peer, call_id)
            if pending is not None and pending.future is not None:
                pending.future.set_exception(self._timeout(peer, pending))
            return
        # The owner may still make the value; until it says so, using the reference fails.
        with peer.lock:
            pending = peer.outgoing.peek(call_id)
        if pending is not None:
            self._references.creation_late(created, self._timeout(peer, pending))

    def fail(self, lost: Sequence[PendingCall], error: Exception) -> None:
        """These calls ended because their peer, or this agent, did."""
        for pending in lost:
            self._agent.leaver.end()
            if pending.future is not None:
                pending.future.set_exception(error)
            if pending.created is not None and isinstance(error, CallError):
                self._references.creation_failed(pending.created, error)

    def _wait_for_references(self, peer: Peer, answer: Frame) -> None:
        arrived: Waiter[OwnerDied | None] = Waiter()
        self._arrive(peer, answer, arrived.deliver)
        error = arrived.wait(math.inf)
        if error is not None:
            raise error

    def _arrive(self, peer: Peer, answer: Frame, then: Callable[[OwnerDied | None], None]) -> None:
        references = answer.message.references  # type: ignore[attr-defined]
        self._agent.meet_owners(references)
        self._references.arrive(
            TransferKey(peer.incarnation, answer.call_id, True), references, then
        )

    def _open(self, peer: Peer, answer: Frame) -> Any:
        """The value of an answer whose references may be used; raises what the callee raised."""
        message = answer.message
        assert isinstance(message, Reply | Failure)
        handles = self._references.handles(message.references) if message.references else ()
        try:
            if isinstance(message, Reply):
                return self._agent.serializer.load(answer.body, answer.buffers, references=handles)
            raise load_failure(
                self._agent.serializer,
                message,
                answer.body,
                answer.buffers,
                worker=peer.name,
                references=handles,
            )
        finally:
            if message.references:
                self._references.taken_over(TransferKey(peer.incarnation, answer.call_id, True))
