"""The end of a call that is served: its value or error goes to the caller, or into its slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from farcall.errors import (
    FarcallError,
    SerializationError,
)
from farcall.ids import RefId
from farcall.log import get_logger
from farcall.protocol.instructions import TransferKey
from farcall.runtime.calls.call_names import readable, readable_result
from farcall.runtime.calls.serving import Serving
from farcall.runtime.membership.peers import Peer
from farcall.runtime.references.handles import RefHandle
from farcall.runtime.references.method_gate import MethodGate
from farcall.runtime.references.values import ValueSlot
from farcall.serde import (
    Payload,
    as_exception,
    message_of,
    reason_of,
    text_failure,
    text_of,
    type_name_of,
)
from farcall.transport.base import Link
from farcall.wire.frames import Frame
from farcall.wire.messages import Buffer, Failure, Reply, Request

logger = get_logger("farcall")

HOW_CALLERS_RAISE = (
    "pass timeout= to the call, or rpc_timeout= in the options of its worker's init_rpc, for more"
)


class Answering(msgspec.Struct, eq=False):
    """A request that is being served: its state, and its one end. See `ServerCall`."""

    serving: Serving
    peer: Peer
    link: Link
    frame: Frame
    request: Request
    deadline: float  # `time.monotonic()` seconds
    cancelled: bool = False  # no caller waits for the outcome
    is_unwanted: bool = False  # since the caller has cancelled it
    is_deferred: bool = False  # the function has returned a future, which is waited for
    stop: Callable[[], None] | None = None  # ends a wait that goes on for it
    queued: int = 0  # bytes by which it counts as queued, see `intake`
    is_ended: bool = False  # it was answered, or its value has been made
    unpins: TransferKey | None = None  # of the references in an answer that waits in a box
    context: int = 0  # the autograd context that the call is part of
    handles: Sequence[RefHandle] | None = None  # of its references, if they all live here
    target: ValueSlot | None = None  # what the function works on, with `Request.on_reference`
    method: str = ""  # `method_of` its arguments, when those are known
    result_ref: RefId | None = None  # where the result goes, of a `remote()` call
    gate: MethodGate | None = None  # of the object whose method is called, if it has one

    @property
    def key(self) -> TransferKey:
        return TransferKey(self.peer.worker.incarnation, self.frame.call_id, of_reply=False)

    def _let_go(self) -> None:
        self.handles = None
        stop, self.stop = self.stop, None
        if stop is not None:
            stop()

    @property
    def _seconds(self) -> str:
        return f"{self.request.timeout:g} s"

    @property
    def name(self) -> str:
        """The name of the requested function, for messages."""
        return readable(self.request.function, self.method)

    # Outcomes. Each request ends once, in `_end`: what runs code of the user before may raise.

    def _succeed(self, result: Any) -> None:
        if self.result_ref is not None:
            value = self.serving.references.slot_of(self.result_ref)
            if value is not None:
                value.set(result)
            self._end()
            return
        try:
            payload = self.serving.pickling.dump(result, self.peer)
        except BaseException as error:  # pickling runs user code
            name = readable_result(self.request.function, self.method, type_name_of(result))
            explained = SerializationError(f"{name} can't be sent: {reason_of(error)}")
            raise explained from error
        reply = Reply()
        gradients = self.serving.gradients
        if self.context and payload.tensors:
            reply.context, reply.sent = gradients.send(self.context, self.peer, payload.tensors)
        self._answer(reply, payload)
        if reply.sent:
            gradients.record(reply.context, reply.sent)

    def _fail(self, error: BaseException) -> None:
        if self.is_ended and self.cancelled:
            return  # given up while its future was completed
        if self.is_ended:
            logger.error(
                "%s: an error after the answer of %s:\n%s",
                self.serving.status.me.name,
                self.request.function,
                text_of(error),
            )
            return
        try:
            self.serving.on_raised(error, self.serving.status.me.info)
            if self.result_ref is not None:
                self._fail_value(error)
                return
            failure, payload = self.serving.pickling.dump_failure(error, self.peer)
            self._answer(failure, payload)
        except BaseException as worse:
            logger.error(
                "%s: could not answer %s with its error:\n%s",
                self.serving.status.me.name,
                self.request.function,
                text_of(worse),
            )
            if not self.is_ended:
                text = f"{message_of(error)} (and answering with it failed: {message_of(worse)})"
                self._answer(text_failure(error, text), Payload(b""))

    def _fail_value(self, error: BaseException) -> None:
        assert self.result_ref is not None
        value = self.serving.references.slot_of(self.result_ref)
        try:
            if value is not None:
                value.fail(as_exception(error, self.serving.status.me.name))
            elif not issubclass(type(error), FarcallError):
                logger.error(
                    "%s: %s raised, and no reference to its result is left:\n%s",
                    self.serving.status.me.name,
                    self.request.function,
                    text_of(error),
                )
        finally:
            self._end()

    def _answer(self, message: Reply | Failure, payload: Payload) -> None:
        handles: Sequence[RefHandle] = payload.references
        is_sent: bool | None = False  # None while it waits in the caller's box
        try:
            if handles:
                is_wanted = self._answer_with(message, handles)
            else:
                is_wanted = self.peer.incoming.finish(self.frame.call_id)
            if is_wanted:
                frame = Frame(message, self.frame.call_id, payload.body, payload.buffers)
                try:
                    is_sent = self.serving.answers.send(self, frame)
                except SerializationError as error:  # it is too large: nothing of it was written
                    self._explain(message, error)
        finally:
            if is_sent is None:
                self.is_ended = True  # but it goes on: `left` ends it
                self.stop = self.handles = None
            elif self.unpins is None:
                self._end()
            else:
                self.left(is_sent=is_sent)

    def left(self, *, is_sent: bool) -> None:
        """End the call here: its answer is sent, or never will be."""
        unpins, self.unpins = self.unpins, None
        if unpins is not None and not is_sent:
            self.serving.references.unpin(unpins)
        self._end()

    def _explain(self, answer: Reply | Failure, error: FarcallError) -> None:
        """Send an error in the place of an answer that can't be sent."""
        what = "result" if isinstance(answer, Reply) else "error"
        function = self.request.function or "the function"
        text = f"the {what} of {function} can't be sent: {reason_of(error)}"
        failure, payload = self.serving.pickling.dump_failure(SerializationError(text), self.peer)
        self._answer_later(failure, payload.body)

    def _end(self) -> None:
        self.is_ended = True
        # A copy of the context in which the function ran may outlive the call, and leads here.
        if self.stop is not None:
            self.stop = None
        if self.handles is not None:
            self.handles = None
        self.serving.coordinator.end(self)

    def _answer_with(self, message: Reply | Failure, handles: Sequence[RefHandle]) -> bool:
        """Put references into the answer, and pin them. Returns whether it is to be sent."""
        call_id = self.frame.call_id
        try:
            refs = [handle.ref for handle in handles]
            self.serving.references.wait_until_sent(handles, self.deadline)
            self.serving.machine.wait_until_confirmed(refs, 0, self.deadline)
        except TimeoutError:
            if not self.peer.incoming.finish(call_id):
                return False
            text = (
                f"the owner of a reference in the result of {self.name} did not confirm within "
                f"{self._seconds} that it knows the reference; {HOW_CALLERS_RAISE}"
            )
            self._answer_later(Failure("farcall.errors.RpcTimeout", text, ""))
            return False
        try:
            references = self.serving.references.travelling(handles)
        except FarcallError as error:
            if self.peer.incoming.finish(call_id):
                self._explain(message, error)
            return False
        if not self.serving.references.answer(self.peer.incarnation, call_id, handles):
            return False
        message.references = references
        self.unpins = TransferKey(self.peer.incarnation, call_id, of_reply=True)
        return True

    def _answer_later(self, message: Failure, body: Buffer = b"") -> None:
        """Send a small message: now, or when the caller takes it. Never waits."""
        self.serving.control.answer(self.peer.incarnation, message, self.frame.call_id, body)
