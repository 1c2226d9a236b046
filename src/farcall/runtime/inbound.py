"""Serving a call: from the request frame to the reply frame."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import torch
from torch.autograd import profiler

from farcall.errors import (
    CallError,
    Cancelled,
    FarcallError,
    InvalidResult,
    LinkError,
    RpcTimeout,
    SerializationError,
)
from farcall.ids import RefId
from farcall.protocol.ref_entries import TransferKey
from farcall.runtime.context import CallContext, current
from farcall.runtime.isolation import put_back_anomaly_mode
from farcall.runtime.peers import Peer
from farcall.runtime.references import RefHandle, references_of
from farcall.runtime.values import OwnedValue
from farcall.serde import (
    Dumped,
    as_exception,
    dump_failure,
    message_of,
    reason_of,
    text_failure,
    text_of,
)
from farcall.transport.base import Link, NotSent
from farcall.wire.frames import Frame
from farcall.wire.messages import Accepted, Failure, Reply, Request

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent

logger = logging.getLogger("farcall")

ASYNC_MARK = "_wrapped_async_rpc_function"


class Deferred(NamedTuple):
    """Returned by farcall's own handlers: the call's value is that of this future, later."""

    future: torch._C.Future[Any]


def result_of(function: Callable[..., Any], result: Any) -> Any:
    """What a function's return value means: one marked async gives a future of the value.

    Raises:
        InvalidResult: a function marked with `async_execution` did not return a future.
    """
    if not hasattr(function, ASYNC_MARK):
        return result
    if isinstance(result, torch._C.Future):
        return Deferred(result)
    if isinstance(getattr(function, ASYNC_MARK), torch.jit.ScriptFunction):
        raise InvalidResult(
            f"Async functions must return an IValue of Future type, but got {type(result).__name__}"
        )
    raise InvalidResult(
        "Functions decorated with @farcall.functions.async_execution must return a "
        f"torch.futures.Future object, but got {type(result).__name__}"
    )


class Job(msgspec.Struct, eq=False):
    """One request that is being served. `run` is called once, by a thread of the executor."""

    agent: Agent
    peer: Peer
    link: Link
    frame: Frame
    request: Request
    deadline: float  # `time.monotonic()` seconds
    cancelled: bool = False
    is_ended: bool = False  # it was answered, or its value has been made
    context: int = 0  # the autograd context that the call is part of
    handles: Sequence[RefHandle] | None = None  # of its references, if they all live here
    target: OwnedValue | None = None  # what the function works on, with `Request.on_reference`
    place: RefId | None = None  # where the result goes, of a `remote()` call

    @property
    def key(self) -> TransferKey:
        return TransferKey(self.peer.worker.incarnation, self.frame.call_id, of_reply=False)

    def start(self) -> None:
        """Accept the request, and run it as soon as its references may be used."""
        request = self.request
        is_admitted = not request.references or self._take_references(request)
        if request.creates:
            self.place = self._create(request)
        if is_admitted:
            self.agent.executor.submit(self.run, request.depth)
        else:
            self.agent.meet_owners(request.references)
            self.agent.references.arrive(self.key, request.references, self._admitted)

    def _take_references(self, request: Request) -> bool:
        """Whether all references live here, and so may be used now."""
        references = self.agent.references
        if request.on_reference and len(request.references) == 1:
            # It is there, and the function gets the place itself: there is no use to be counted.
            self.target = references.made_place(request.references[0])
            if self.target is not None:
                return True
        self.handles = references.own_handles(request.references)
        return self.handles is not None

    def _create(self, request: Request) -> RefId:
        caller = self.peer.incarnation
        place = RefId(caller, request.creates)
        if caller != self.agent.me.incarnation:
            self.agent.references.accept_creation(place, caller, request.sequence)
        self.peer.incoming.finish(self.frame.call_id)
        self.agent.executor.may_pass_lead()
        self._send(Frame(Accepted(), self.frame.call_id))
        return place

    def _admitted(self, error: CallError | None) -> None:
        if error is None:
            self.agent.executor.submit(self.run, self.request.depth)
        else:
            self._fail(error)

    def run(self) -> None:
        """Run the function, and answer whatever happens. In a context of its own."""
        try:
            if self.request.context:
                self.context = self.agent.gradients.enter(self.request.context, self.peer)
            served = (self.request.function, self.peer.name)
            depth = self.request.depth
            current.set(CallContext(self.agent, self.deadline, self.context, served, depth))
            try:
                result = self._call()
            finally:
                put_back_anomaly_mode()
            if type(result) is Deferred:
                result.future.add_done_callback(self._finish_later)
            else:
                self._succeed(result)
        except BaseException as error:
            self._fail(error)

    def _call(self) -> Any:
        function, args, kwargs = self._load()
        if profiler._is_profiler_enabled:
            return self._call_recorded(function, args, kwargs)
        if self.request.no_grad:
            with torch.no_grad():
                return result_of(function, function(*args, **kwargs))
        return result_of(function, function(*args, **kwargs))

    def _call_recorded(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # What came by value has no name but its own.
        name = self.request.function or getattr(function, "__qualname__", "")
        event = profiler.record_function(f"rpc#{name}({self.peer.name} -> {self.agent.me.name})")
        with event, torch.set_grad_enabled(not self.request.no_grad):
            return result_of(function, function(*args, **kwargs))

    def _load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        agent, request, frame = self.agent, self.request, self.frame
        handles, self.handles = self.handles, None
        target, self.target = self.target, None
        arrived = handles is None and target is None and request.references
        try:
            if self.cancelled or time.monotonic() > self.deadline:
                self._refuse()
            if not agent.policy.allows_all:
                agent.policy.check(request.function)
            if arrived:
                handles = agent.references.handles(request.references)
            attach = None
            if request.sent:
                attach = agent.gradients.receive(self.context, self.peer, request.sent)
            if handles and request.on_reference and target is None:
                target = agent.references.value_of(handles[0])
                # Kept until the answer: what is not made yet must not be dropped meanwhile.
                self.handles, handles = handles[:1], handles[1:]
            loaded = agent.serializer.load(
                frame.body, frame.buffers, references=handles or (), attach=attach
            )
        finally:
            # Also of a request that is not unpickled at all.
            if arrived:
                agent.references.taken_over(self.key)
        frame.body, frame.buffers = b"", ()
        if request.function:
            args, kwargs = loaded
            function = agent.serializer.functions.resolve(request.function)
            if not agent.policy.allows_all:
                agent.policy.check_found(request.function, function)
        else:
            function, args, kwargs = loaded
        return function, args if target is None else (target, *args), kwargs

    def _refuse(self) -> NoReturn:
        if self.cancelled:
            raise Cancelled(f"the caller gave up on {self.request.function} before it was run")
        raise RpcTimeout(
            f"{self.request.function} was not run before its deadline"
            + self.agent.outcomes.shortage()
        )

    def _finish_later(self, future: torch._C.Future[Any]) -> None:
        if self.is_ended:
            return  # a future of the user's own class may call back twice, or call and then raise
        try:
            self._succeed(future.value())
        except BaseException as error:
            self._fail(error)

    # Outcomes. Each request ends once, in `_end`: what runs code of the user before may raise.

    def _succeed(self, result: Any) -> None:
        if self.place is not None:
            value = self.agent.references.place_of(self.place)
            if value is not None:
                value.set(result)
            self._end()
            return
        try:
            dumped = self.agent.dump(result, self.peer)
        except BaseException as error:  # pickling runs user code
            explained = SerializationError(
                f"the result of {self.request.function or 'the function'} can't be sent: "
                + reason_of(error)
            )
            raise explained from error
        reply = Reply()
        gradients = self.agent.gradients
        if self.context and dumped.tensors:
            reply.context, reply.sent = gradients.send(self.context, self.peer, dumped.tensors)
        self._answer(reply, dumped)
        if reply.sent:
            gradients.record(reply.context, reply.sent)

    def _fail(self, error: BaseException) -> None:
        if self.is_ended:
            logger.error(
                "%s: an error after the answer of %s:\n%s",
                self.agent.me.name,
                self.request.function,
                text_of(error),
            )
            return
        try:
            self.agent.on_raised(error)
            if self.place is not None:
                self._fail_value(error)
                return
            failure, dumped = dump_failure(
                self.agent.serializer, error, by_value=not self.peer.same_program
            )
            self._answer(failure, dumped)
        except BaseException as worse:
            logger.error(
                "%s: could not answer %s with its error:\n%s",
                self.agent.me.name,
                self.request.function,
                text_of(worse),
            )
            if not self.is_ended:
                text = f"{message_of(error)} (and answering with it failed: {message_of(worse)})"
                self._answer(text_failure(error, text), Dumped(b""))

    def _fail_value(self, error: BaseException) -> None:
        assert self.place is not None
        value = self.agent.references.place_of(self.place)
        try:
            if value is not None:
                value.fail(as_exception(error, self.agent.me.name))
            elif not issubclass(type(error), FarcallError):
                logger.error(
                    "%s: %s raised, and nobody holds a reference to its result any more:\n%s",
                    self.agent.me.name,
                    self.request.function,
                    text_of(error),
                )
        finally:
            self._end()

    def _answer(self, message: Reply | Failure, dumped: Dumped) -> None:
        handles: Sequence[RefHandle] = dumped.references
        try:
            if self.peer.incoming.finish(self.frame.call_id):
                if handles and not self._wait_until_accepted(handles):
                    return
                if handles:
                    key = TransferKey(self.peer.incarnation, self.frame.call_id, of_reply=True)
                    message.references = references_of(handles)
                    self.agent.references.pin(key, handles)
                frame = Frame(message, self.frame.call_id, dumped.body, dumped.buffers)
                if not self._send_or_explain(frame) and handles:
                    self.agent.references.unpin(key)
        finally:
            self._end()

    def _send_or_explain(self, frame: Frame) -> bool:
        """Send an answer. Returns whether the caller gets it, and not an error in its place."""
        try:
            return self._send(frame)
        except SerializationError as error:  # it is too large: nothing of it was written
            what = "result" if isinstance(frame.message, Reply) else "error"
            function = self.request.function or "the function"
            text = f"the {what} of {function} can't be sent: {reason_of(error)}"
            failure, dumped = dump_failure(self.agent.serializer, SerializationError(text))
        self._send(Frame(failure, self.frame.call_id, dumped.body))
        return False

    def _end(self) -> None:
        self.is_ended = True
        self.agent.leaver.end(self)

    def _wait_until_accepted(self, handles: Sequence[RefHandle]) -> bool:
        """For references that are just being created elsewhere. False: the caller gave up."""
        try:
            self.agent.references.wait_until_accepted(handles, 0, self.deadline)
        except TimeoutError:
            failure = Failure("farcall.errors.RpcTimeout", "a reference was not accepted", "")
            self._send(Frame(failure, self.frame.call_id))
            return False
        return True

    def _send(self, frame: Frame) -> bool:
        """Send to the caller. False: it won't get the frame, for it is gone or does not read.

        Raises:
            SerializationError: the frame is too large.
        """
        try:
            self.link.send(frame, self.deadline)
        except (LinkError, NotSent):
            return False
        except TimeoutError:
            pass  # the rest of the frame follows when the caller reads again
        return True
