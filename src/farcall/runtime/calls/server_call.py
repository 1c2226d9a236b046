"""Serving a call: from the request frame to the reply frame."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.autograd import profiler

from farcall.errors import (
    CallError,
    Cancelled,
    RpcTimeout,
)
from farcall.ids import RefId
from farcall.log import get_logger
from farcall.protocol.worker import WorkerMachine
from farcall.runtime.calls import intake, policy
from farcall.runtime.calls.answering import HOW_CALLERS_RAISE, Answering
from farcall.runtime.calls.call_names import OF_METHODS, Served, method_of
from farcall.runtime.calls.deferred import Deferred, result_of
from farcall.runtime.context import CallContext, set_context
from farcall.runtime.options.timeouts import ran_too_long
from farcall.runtime.references.handles import RefHandle
from farcall.runtime.references.method_gate import MethodGate
from farcall.runtime.threads.forked import end_forked_process
from farcall.runtime.threads.isolation import put_back_anomaly_mode
from farcall.serde import check_defined
from farcall.torch_internals import Future as TorchFuture
from farcall.torch_internals import is_profiler_enabled
from farcall.wire.messages import CANCELLED, Failure, Request, Turn

logger = get_logger("farcall")


class ServerCall(Answering, eq=False):
    """One request that is being served. `run` is called once, by a thread of the executor."""

    def start(self) -> None:
        """Accept the request, and run it as soon as its references may be used."""
        request = self.request
        if not (request.references or request.creates):
            if not self.serving.executor.run_here(self.run, request.depth, self.peer):
                self._queue()
        elif self._admit(request):
            if self.gate is not None:
                self._enter()
            elif not self.serving.executor.run_here(self.run, request.depth, self.peer):
                self._queue()
        else:
            self.serving.machine.arrive(self.key, request, self._admitted)
            if self.cancelled:  # perhaps before it could be found there
                self.cancel()

    def _admit(self, request: Request) -> bool:
        """Return whether the function may run: all references of the request live here."""
        references = self.serving.references
        counted = request.references
        if request.on_reference and counted:  # a peer may say the one without the other
            slot_here = references.slot_here(counted[0])
            if slot_here is not None:
                if slot_here.gate is not None:
                    self._line_up(slot_here.gate)
                if len(counted) == 1 and slot_here.is_ready:
                    # The function gets the slot itself: there is no use to be counted.
                    self.target = slot_here
                    if not request.creates:
                        return True
                    counted = ()
        caller = self.peer.incarnation
        if request.creates:
            self.result_ref = WorkerMachine.created_by(caller, request)
        call_id, created = self.frame.call_id, self.result_ref
        concurrency = 0 if request.extras is None else request.extras.concurrency
        if not references.admit(caller, call_id, counted, created, request.sequence, concurrency):
            return False
        if counted:
            self.handles = [RefHandle(references, one) for one in counted]  # counted just now
        return True

    def _admitted(self, error: CallError | None) -> None:
        if error is not None:
            if self.gate is not None:
                self.gate.give_up(self)
                intake.begin(self)
            self._fail(error)
        elif self.gate is not None:
            self._enter()
        elif not self.serving.executor.run_here(self.run, self.request.depth, self.peer):
            self._queue()

    # Of an object that lets only some calls of its methods run at once.

    def _line_up(self, gate: MethodGate) -> None:
        """Take a place in the line of the object, and count as queued until the turn comes."""
        intake.queue(self)
        self.gate = gate
        gate.arrive(self, self._turns_here())

    def _turns_here(self) -> list[int]:
        """Return the turns at the object of the calls of its methods that this call comes from."""
        request, extras = self.request, self.request.extras
        if extras is None:
            return []
        reference = request.references[0]
        here = (reference.minted_by, reference.number)
        return [turn for *at, turn in extras.held if tuple(at) == here]

    def _enter(self) -> None:
        assert self.gate is not None
        if self.gate.admit(self):
            executor = self.serving.executor
            if not executor.run_here(self._run_in_turn, self.request.depth, self.peer):
                self.take_turn()

    def take_turn(self) -> None:
        """Run in another thread: the turn of the call has come."""
        self.serving.executor.queue(self._run_in_turn, self.request.depth, self.peer)

    def _run_in_turn(self) -> None:
        intake.begin(self)
        self.run()
        if self.is_ended or not self.is_deferred:
            self._leave_turn()

    def _leave_turn(self) -> None:
        if self.gate is not None:
            self.gate.leave(self)

    @property
    def held(self) -> tuple[Turn, ...]:
        """The turns that calls hold which this call's function makes, see `Extras`."""
        extras = self.request.extras
        held = () if extras is None else extras.held
        if self.gate is None:
            return held
        reference = self.request.references[0]
        return (*held, (reference.minted_by, reference.number, self.gate.turn(self)))

    def _queue(self) -> None:
        """Have it run when there is a thread for it."""
        intake.queue(self)
        self.serving.executor.queue(self.run_queued, self.request.depth, self.peer)

    def run_queued(self) -> None:
        """Run a call as `run` does, after it was counted as queued."""
        if self.gate is None:
            intake.begin(self)
            self.run()
        else:  # its caller did not read, so it gave its turn to others
            self.gate.arrive(self, self._turns_here())
            self._enter()

    def run(self) -> None:
        """Run the function, and answer whatever happens. In a context of its own."""
        is_read = self.peer.back_outbox.is_idle
        if not is_read and self.result_ref is None and intake.holds(self):
            return  # it is run when the caller has read more
        try:
            if self.request.context:
                self.context = self.serving.gradients.enter(self.request.context, self.peer)
            depth = self.request.depth
            set_context(CallContext(self.serving.agent, self.deadline, self.context, depth, self))
            try:
                result = self._call()
            finally:
                if self.serving.executor.collecting.is_forked:
                    end_forked_process()
                if torch.is_anomaly_enabled():
                    put_back_anomaly_mode()
            if type(result) is Deferred:
                self._defer(result)
            else:
                self._succeed(result)
        except BaseException as error:
            failure = error
        else:
            return
        # Behind the handler: what waits for this would else raise it "during handling of" itself.
        try:
            self._fail(failure)
        finally:
            del failure  # its traceback has this frame

    def _call(self) -> Any:
        function, args, kwargs = self._load()
        if is_profiler_enabled():
            return self._call_recorded(function, args, kwargs)
        if self.request.no_grad:
            with torch.no_grad():
                return result_of(function, function(*args, **kwargs))
        return result_of(function, function(*args, **kwargs))

    def _call_recorded(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A function that came by value has no name but its own.
        name = self.request.function or getattr(function, "__qualname__", "")
        event = profiler.record_function(
            f"rpc#{name}({self.peer.name} -> {self.serving.status.me.name})"
        )
        with event, torch.set_grad_enabled(not self.request.no_grad):
            return result_of(function, function(*args, **kwargs))

    def _load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        serving, request, frame = self.serving, self.request, self.frame
        serializer, only = serving.pickling.serializer, self.peer.only
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
            if only is not None:
                policy.check(only, request.function)
            if arrived:
                handles = serving.references.handles(request.references)
            attach = None
            if request.sent:
                attach = serving.gradients.receive(self.context, self.peer, request.sent)
            if handles and request.on_reference and target is None:
                target = serving.references.value_of(handles[0])
                # Kept until the answer: an object in the making must not be dropped meanwhile.
                self.handles, handles = handles[:1], handles[1:]
            loaded = serializer.load(
                frame.body, frame.buffers, references=handles or (), attach=attach, only=only
            )
        finally:
            # Also of a request that is not unpickled at all.
            if arrived:
                serving.machine.taken_over(self.key)
        frame.body = b""
        if frame.buffers:
            frame.buffers = ()
        if request.function:
            args, kwargs = loaded
            function = serializer.functions.resolve(request.function)
            if only is not None:
                check_defined(request.function, function)
                policy.check_target(request.function, is_slot=target is not None)
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
            f"{ran_too_long(self.request.timeout)}: {self.name} was not run by its deadline, "
            f"{self._seconds} after it came"
            + self.serving.shortage.describe()
            + f"; the caller {self.peer.name!r} set the limit: {HOW_CALLERS_RAISE}"
        )

    def _defer(self, result: Deferred) -> None:
        """Wait for a future without a thread, as long as its value is wanted.

        The future may be the user's, and never complete. It is not kept here: the future's callback
        leads to this call, and no garbage collector sees cycles through a future of torch's.
        """
        # Written first, then the caller's state is read; `cancel` and `Drop` do it the other way
        # round. So one of both sides sees the other.
        self.stop, self.is_deferred = result.stop, True
        if self.result_ref is not None:
            self._tie_to(self.result_ref)
        elif self.cancelled:
            self._give_up()
        if not self.is_ended:
            result.future.add_done_callback(self._finish_later)

    def _tie_to(self, ref: RefId) -> None:
        """Have the wait for the value of a `remote()` call end with the last reference to it."""
        references = self.serving.references
        slot = references.slot_of(ref)
        if slot is not None:
            slot.on_dropped = self._no_longer_wanted
        if references.slot_of(ref) is None:
            self._no_longer_wanted()

    def _no_longer_wanted(self) -> None:
        """Count no longer as going on. If the future fails after all, its error is still logged."""
        self._let_go()
        self._leave_turn()
        self.serving.coordinator.end(self)

    def cancel(self, by_user: bool = False) -> None:
        """Stop what can be stopped: the caller gave up, or is lost.

        A function that has not begun won't, and a future that a function has returned is waited for
        no longer. A function that runs goes on, unless it waits for a value of this worker.

        Args:
            by_user: the caller was asked to give up. Then the calls of the function end, too.
        """
        self.cancelled = True
        if by_user:
            # Written first, then the calls are looked for; `Requests.begin` does it the other way.
            self.is_unwanted = True
            self.serving.agent.cancelling.calls_of(self)
        if self.is_deferred:
            self._give_up()
        elif self.stop is not None:
            self._end_wait()
        elif self.gate is not None and self.gate.give_up(self):
            self.take_turn()  # where it is refused
        elif self.request.references:
            # No effect if the request does not wait for the owners of its references.
            gone = Cancelled(f"the caller gave up on {self.name} before it was run")
            self.serving.machine.stop_waiting(self.key, gone)

    def limit(self) -> tuple[float, float, Served]:
        """Return the time that the caller gives: see `CallLimits.of_call` for calls made here."""
        served = (self.request.function, self.method, self.peer.name)
        return self.deadline, self.request.timeout, served

    @contextlib.contextmanager
    def stopped_by(self, stop: Callable[[], None]) -> Iterator[None]:
        """Let `stop` end the function's wait inside the block if the call is cancelled."""
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
        ends_by_itself = self.deadline != math.inf and self.peer.loss_cause is None
        if stop is not None and (self.is_unwanted or not ends_by_itself):
            stop()

    def _give_up(self) -> None:
        """End a call whose function has returned a future. The future stays the user's."""
        self._let_go()
        try:
            if self.peer.incoming.finish(self.frame.call_id):
                text = f"the caller gave up on {self.name} before its future was completed"
                answer = Failure(CANCELLED, text, "")
                self._answer_later(answer)
        finally:
            self._end()
            self._leave_turn()

    def _finish_later(self, future: TorchFuture[Any]) -> None:
        if self.is_ended:
            return  # given up; or a future of the user's own class calls back twice, or then raises
        failure: BaseException | None = None
        try:
            self._succeed(future.value())
        except BaseException as error:
            failure = error
        try:
            if failure is not None:
                self._fail(failure)  # as in `run`
        finally:
            del failure
            self._leave_turn()
