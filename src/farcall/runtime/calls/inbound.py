"""Serving a call: from the request frame to the reply frame."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
from torch.autograd import profiler

from farcall.errors import (
    CallError,
    Cancelled,
    FarcallError,
    RpcTimeout,
    SerializationError,
)
from farcall.ids import RefId, original
from farcall.log import get_logger
from farcall.protocol.instructions import TransferKey
from farcall.runtime.calls import intake
from farcall.runtime.calls.call_names import FETCH, OF_METHODS, Served, method_of, readable
from farcall.runtime.calls.deferred import Deferred, result_of
from farcall.runtime.context import CallContext, set_context
from farcall.runtime.membership.peers import Peer
from farcall.runtime.references.handles import RefHandle
from farcall.runtime.references.values import OwnedValue
from farcall.runtime.threads.isolation import put_back_anomaly_mode
from farcall.serde import (
    Dumped,
    as_exception,
    dump_failure,
    message_of,
    reason_of,
    text_failure,
    text_of,
    type_name_of,
)
from farcall.transport.base import Link
from farcall.wire.frames import Frame
from farcall.wire.messages import Buffer, Failure, Reply, Request

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent

logger = get_logger("farcall")

HOW_CALLERS_RAISE = (
    "pass timeout= to the call, or rpc_timeout= in the options of its worker's init_rpc, for more"
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
    is_deferred: bool = False  # the function has returned a future, which is waited for
    stop: Callable[[], None] | None = None  # ends a wait that goes on for it
    queued: int = 0  # bytes by which it counts as queued, see `intake`
    is_ended: bool = False  # it was answered, or its value has been made
    unpins: TransferKey | None = None  # of the references in an answer that waits in a box
    context: int = 0  # the autograd context that the call is part of
    handles: Sequence[RefHandle] | None = None  # of its references, if they all live here
    target: OwnedValue | None = None  # what the function works on, with `Request.on_reference`
    method: str = ""  # `method_of` its arguments, when those are known
    place: RefId | None = None  # where the result goes, of a `remote()` call

    @property
    def key(self) -> TransferKey:
        return TransferKey(self.peer.worker.incarnation, self.frame.call_id, of_reply=False)

    def start(self) -> None:
        """Accept the request, and run it as soon as its references may be used."""
        request = self.request
        if not (request.references or request.creates) or self._admit(request):
            if not self.agent.executor.run_here(self.run, request.depth, self.peer):
                self._queue()
        else:
            self.agent.machine.arrive(self.key, request, self._admitted)
            if self.cancelled:  # perhaps before it could be found there
                self.cancel()

    def _admit(self, request: Request) -> bool:
        """Whether the function may run: all references of the request live here."""
        references = self.agent.references
        counted = request.references
        if request.on_reference and len(counted) == 1:
            # It is there, and the function gets the place itself: there is no use to be counted.
            self.target = references.made_place(counted[0])
            if self.target is not None:
                if not request.creates:
                    return True
                counted = ()
        caller = self.peer.incarnation
        if request.creates:
            self.place = RefId(original(caller), request.creates)
        if not references.admit(caller, self.frame.call_id, request, counted):
            return False
        if counted:
            self.handles = references.handles_of_own(counted)
        return True

    def _admitted(self, error: CallError | None) -> None:
        if error is not None:
            self._fail(error)
        elif not self.agent.executor.run_here(self.run, self.request.depth, self.peer):
            self._queue()

    def _queue(self) -> None:
        """Have it run when there is a thread for it."""
        intake.queue(self)
        self.agent.executor.queue(self.run_queued, self.request.depth, self.peer)

    def run_queued(self) -> None:
        """Like `run`, of what was counted as queued."""
        intake.begin(self)
        self.run()

    def run(self) -> None:
        """Run the function, and answer whatever happens. In a context of its own."""
        is_read = self.peer.back_outbox.is_idle
        if not is_read and self.place is None and intake.holds(self):
            return  # it is run when the caller has read more
        try:
            if self.request.context:
                self.context = self.agent.gradients.enter(self.request.context, self.peer)
            depth = self.request.depth
            set_context(CallContext(self.agent, self.deadline, self.context, depth, self))
            try:
                result = self._call()
            finally:
                if torch.is_anomaly_enabled():
                    put_back_anomaly_mode()
            if type(result) is Deferred:
                self._defer(result)
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
        handles, target = self.handles, self.target
        # Assigned only if they change: that takes as long as a small call of Python.
        if handles is not None:
            self.handles = None
        if target is not None:
            self.target = None
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
                agent.machine.taken_over(self.key)
        frame.body = b""
        if frame.buffers:
            frame.buffers = ()
        if request.function:
            args, kwargs = loaded
            function = agent.serializer.functions.resolve(request.function)
            if not agent.policy.allows_all:
                agent.policy.check_found(request.function, function)
        else:
            function, args, kwargs = loaded
        args = args if target is None else (target, *args)
        if request.function in OF_METHODS:
            self.method = method_of(request.function, args)
        return function, args, kwargs

    def _refuse(self) -> NoReturn:
        if self.cancelled:
            raise Cancelled(f"the caller gave up on {self.name} before it was run")
        raise RpcTimeout(
            f"{self.name} was not run by its deadline, {self._seconds} after it came"
            + self.agent.outcomes.shortage()
            + f"; the caller {self.peer.name!r} set the limit: {HOW_CALLERS_RAISE}"
        )

    def _defer(self, result: Deferred) -> None:
        """Wait for a future without a thread, as long as somebody wants its value.

        The future may be the user's, and never complete. It is not kept here: the future's callback
        leads to this job, and no garbage collector sees cycles through a future of torch's.
        """
        # Written first, then the caller's state is read; `cancel` and `Drop` do it the other way
        # round. So one of both sides sees the other.
        self.stop, self.is_deferred = result.stop, True
        if self.place is not None:
            self._tie_to(self.place)
        elif self.cancelled:
            self._give_up()
        if not self.is_ended:
            result.future.add_done_callback(self._finish_later)

    def _tie_to(self, ref: RefId) -> None:
        """Have the wait for the value of a `remote()` call end with the last reference to it."""
        references = self.agent.references
        place = references.place_of(ref)
        if place is not None:
            place.on_dropped = self._no_longer_wanted
        if references.place_of(ref) is None:
            self._no_longer_wanted()

    def _no_longer_wanted(self) -> None:
        """Count no longer as going on. If the future fails after all, its error is still logged."""
        self._let_go()
        self.agent.leaver.end(self)

    def cancel(self) -> None:
        """Stop what can be stopped: the caller gave up, or is lost.

        A function that has not begun won't, and a future that a function has returned is waited for
        no longer. A function that runs goes on, unless it waits for a value of this worker.
        """
        self.cancelled = True
        if self.is_deferred:
            self._give_up()
        elif self.stop is not None:
            self._end_wait()
        elif self.request.references:
            # No effect if the request does not wait for the owners of its references.
            gone = Cancelled(f"the caller gave up on {self.name} before it was run")
            self.agent.machine.stop_waiting(self.key, gone)

    def limit(self) -> tuple[float, float, Served]:
        """The time that the caller gives, as `Outbound.deadline` gives it for calls made here."""
        served = (self.request.function, self.method, self.peer.name)
        return self.deadline, self.request.timeout, served

    @contextlib.contextmanager
    def stopped_by(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside the block the function waits; `stop` ends the wait if the call is cancelled."""
        self.stop = stop
        try:
            if self.cancelled:
                self._end_wait()
            yield
        finally:
            self.stop = None

    def _end_wait(self) -> None:
        """End a wait of the function, unless it ends by itself when the caller's time is over."""
        stop = self.stop
        if stop is not None and (self.deadline == math.inf or self.peer.lost is not None):
            stop()

    def _give_up(self) -> None:
        """End a call whose function has returned a future. The future stays the user's."""
        self._let_go()
        try:
            if self.peer.incoming.finish(self.frame.call_id):
                text = f"the caller gave up on {self.name} before its future was completed"
                answer = Failure("farcall.errors.Cancelled", text, "")
                self._answer_later(answer)
        finally:
            self._end()

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
        """What the caller asked for, for messages."""
        return readable(self.request.function, self.method)

    def _finish_later(self, future: torch._C.Future[Any]) -> None:
        if self.is_ended:
            return  # given up; or a future of the user's own class calls back twice, or then raises
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
                f"{self._result_name(result)} can't be sent: {reason_of(error)}"
            )
            raise explained from error
        reply = Reply()
        gradients = self.agent.gradients
        if self.context and dumped.tensors:
            reply.context, reply.sent = gradients.send(self.context, self.peer, dumped.tensors)
        self._answer(reply, dumped)
        if reply.sent:
            gradients.record(reply.context, reply.sent)

    def _result_name(self, result: Any) -> str:
        if self.request.function == FETCH:
            return f"the value of the reference, of type {type_name_of(result)},"
        return f"the result of {self.name}"

    def _fail(self, error: BaseException) -> None:
        if self.is_ended and self.cancelled:
            return  # given up while its future was completed
        if self.is_ended:
            logger.error(
                "%s: an error after the answer of %s:\n%s",
                self.agent.me.name,
                self.request.function,
                text_of(error),
            )
            return
        try:
            self.agent.likeness.on_raised(error)
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
        is_sent: bool | None = False  # None: it waits in the caller's box
        try:
            if handles:
                is_wanted = self._answer_with(message, handles)
            else:
                is_wanted = self.peer.incoming.finish(self.frame.call_id)
            if is_wanted:
                frame = Frame(message, self.frame.call_id, dumped.body, dumped.buffers)
                try:
                    is_sent = self.agent.answers.send(self, frame)
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
        """The answer is sent, or never will be."""
        unpins, self.unpins = self.unpins, None
        if unpins is not None and not is_sent:
            self.agent.references.unpin(unpins)
        self._end()

    def _explain(self, answer: Reply | Failure, error: SerializationError) -> None:
        """Send an error in the place of an answer that can't be sent."""
        what = "result" if isinstance(answer, Reply) else "error"
        function = self.request.function or "the function"
        text = f"the {what} of {function} can't be sent: {reason_of(error)}"
        failure, dumped = dump_failure(self.agent.serializer, SerializationError(text))
        self._answer_later(failure, dumped.body)

    def _end(self) -> None:
        self.is_ended = True
        # A copy of the context in which the function ran may outlive the call, and leads here.
        if self.stop is not None:
            self.stop = None
        if self.handles is not None:
            self.handles = None
        self.agent.leaver.end(self)

    def _answer_with(self, message: Reply | Failure, handles: Sequence[RefHandle]) -> bool:
        """Put references into the answer, and pin them. Returns whether it is to be sent."""
        call_id = self.frame.call_id
        try:
            refs = [handle.ref for handle in handles]
            self.agent.machine.wait_until_confirmed(refs, 0, self.deadline)
        except TimeoutError:
            if not self.peer.incoming.finish(call_id):
                return False
            text = (
                f"the owner of a reference in the result of {self.name} did not confirm within "
                f"{self._seconds} that it knows the reference; {HOW_CALLERS_RAISE}"
            )
            self._answer_later(Failure("farcall.errors.RpcTimeout", text, ""))
            return False
        if not self.agent.references.answer(self.peer.incarnation, call_id, handles):
            return False
        message.references = tuple([handle.reference for handle in handles])
        self.unpins = TransferKey(self.peer.incarnation, call_id, of_reply=True)
        return True

    def _answer_later(self, message: Failure, body: Buffer = b"") -> None:
        """Send what is small: now, or when the caller takes it. Never waits."""
        self.agent.control.answer(self.peer.incarnation, message, self.frame.call_id, body)
