"""The ends of a worker's calls. Every call that was begun ends once: by its answer (`arrived`),
by time (`give_up`, `expire`), by its link (`unreachable`), or with its peer or its agent (`fail`).
The `Outgoing` machine of the peer decides which was first. But an answer that a waiting thread has
in hand counts, also if the machine heard of the loss of the peer before that thread told it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from farcall.errors import (
    AuthenticationFailed,
    BadFrame,
    CallError,
    Cancelled,
    LinkError,
    RpcTimeout,
)
from farcall.ids import WorkerInfo
from farcall.log import get_logger
from farcall.protocol.instructions import TransferKey
from farcall.runtime.calls.deadlines import Deadlines
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.limits import CallLimits
from farcall.runtime.calls.shortage import Shortage
from farcall.runtime.context import CallContext, ServingAgent, reset_context, set_context
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.machine import Continuation, Machine
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.losses import Loss, Losses
from farcall.runtime.membership.peers import Peer, PendingCall
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.options.timeouts import ran_too_long
from farcall.runtime.references.handles import References
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor
from farcall.runtime.threads.isolation import between_functions, call_isolated, clean_thread
from farcall.serde import Serializer, load_failure
from farcall.transport.base import NotSent
from farcall.transport.waiter import Waiter
from farcall.wire.frames import Frame
from farcall.wire.messages import Accepted, Failure, Reply

logger = get_logger("farcall")

OWNER_IS_LATE = "; the answer is here, but the owner of a reference in it has not confirmed that"
NO_TENSOR_BYTES = 16  # a value that is pickled in so few is no tensor
SLOW_SECONDS = 1.0  # a call that takes longer has a line in the log, at level DEBUG


class CallCompletion:
    """The ends of the calls that an agent makes. Thread-safe.

    Args:
        agent: in whose name callbacks run.
        wake: wakes the leader of the agent.
        translate: see `Quirks`.

    Attributes:
        deadlines: of the calls that are watched.
        waiting: the calls that were answered, with references that can't be used yet.
    """

    def __init__(
        self,
        agent: ServingAgent,
        status: Status,
        directory: Directory,
        losses: Losses,
        machine: Machine,
        references: References,
        serializer: Serializer,
        gradients: DistributedGradients,
        executor: Executor,
        coordinator: ShutdownCoordinator,
        limits: CallLimits,
        shortage: Shortage,
        wake: Callable[[], None],
        translate: Callable[[Any, WorkerInfo], BaseException],
    ) -> None:
        self._agent = agent
        self._status = status
        self._directory = directory
        self._losses = losses
        self._machine = machine
        self._references = references
        self._serializer = serializer
        self._gradients = gradients
        self._executor = executor
        self._coordinator = coordinator
        self._limits = limits
        self._shortage = shortage
        self._wake = wake
        self._translate = translate
        self.deadlines = Deadlines(self.watched)
        self._says_slow = logger.isEnabledFor(logging.DEBUG)  # asking for each call costs more
        self._queued: set[PendingCall] = set()  # answered, but no thread runs their callbacks yet
        self.waiting: set[PendingCall] = set()

    def unreachable(self, pending: PendingCall, error: LinkError) -> Exception:
        """End a call whose link failed before or while it was made. Return the error. May wait.

        Its cause is the link's error, or none if that is it: a cycle would keep frames alive.
        """
        if self._status.is_closed:
            ended: Exception = self._status.closed_error()
            self._retract(pending, ended)
        elif isinstance(error, AuthenticationFailed | BadFrame):
            self._retract(pending, error)
            return error
        else:
            self._losses.unreachable(pending.peer, error, pending.deadline)
            ended = self._status.ended(pending.peer)
        ended.__cause__ = error
        return ended

    def give_up(self, pending: PendingCall, error: BaseException) -> RpcTimeout:
        """End a call that took too long. Return the error, which its future has got, too."""
        ended = self.timeout(pending, error)
        if isinstance(error, NotSent):
            self._retract(pending, ended)
        else:
            pending.sent = True
            self.abandon(pending, ended)
        return ended

    def _retract(self, pending: PendingCall, error: Exception) -> None:
        """Withdraw a request that was not sent."""
        if self.withdraw(pending, str(error)):
            pending.fail(error)
            self._coordinator.end(pending)

    def withdraw(self, pending: PendingCall, cause: str) -> bool:
        """Withdraw a call that the callee has not heard of; return whether the call is to end."""
        call_id, pending.call_id = pending.call_id, 0  # another call's from now on: CALL-4
        retract = self._machine.state.retract
        return self._machine.tell(retract, pending.peer.incarnation, call_id, pending, cause)

    def abandon(self, pending: PendingCall, error: Exception) -> bool:
        """Hear that no thread waits for the answer any more. Returns whether that ends the call."""
        peer = pending.peer.incarnation
        with self._machine.lock:
            if not self._machine.state.abandon(peer, pending.call_id, pending):
                return False
        try:
            self._machine.run()
            # If it is not sent, a thread is about to, and does the rest: `expired` or `withdraw`.
        finally:
            pending.fail(error)
            self._coordinator.end(pending)
        return True

    def sent_and_awaited(self, pending: PendingCall) -> None:
        """Note that the request was sent, and that a thread waits for its answer."""
        pending.sent = True
        if pending.cancelled:
            ask = self._machine.state.ask_to_end
            self._machine.tell(ask, pending.peer.incarnation, pending.call_id, pending)

    def sent(self, pending: PendingCall) -> None:
        """Note that the request was sent, or some of it; the rest follows."""
        pending.sent = True
        if pending.cancelled or not pending.watched:
            self.expired(pending)

    def expired(self, pending: PendingCall) -> None:
        """Note that the request of a call was sent that has ended: at its deadline, or by the user.

        The flag `sent` was set before. So the machine sees it here, or in `abandon`, or both.
        """
        late = self._machine.state.sent_late
        self._machine.tell(late, pending.peer.incarnation, pending.call_id, pending)

    def interrupted(self, pending: PendingCall, error: BaseException, may_be_sent: bool) -> None:
        """End a call during whose making an unexpected error came, such as KeyboardInterrupt."""
        call_id = pending.call_id = pending.call_id or pending.peer.outgoing.find(pending)
        ended = Cancelled(f"{type(error).__name__} while the call was made")
        if may_be_sent:
            pending.sent = True
            if not self.abandon(pending, ended):
                self.expired(pending)
        elif call_id:
            self._retract(pending, ended)
        # Its answer may be out of all tables, in the hands of a thread that was interrupted.
        self._coordinator.end(pending)

    def watch(self, pending: PendingCall) -> None:
        """See to it that `expire` is called in time, for no thread waits for this call itself.

        The call must be in a table that `watched` looks at.
        """
        pending.watched = True
        deadlines = self.deadlines
        if pending.deadline < deadlines.next and deadlines.note(pending.deadline):
            self._wake()

    def watched(self) -> list[PendingCall]:
        """Return the calls that are being watched."""
        return [call for call in self.open_calls() if call.watched]

    def open_calls(self) -> list[PendingCall]:
        """Return the calls that have no outcome yet, or one whose references can't be used."""
        by_peer = [peer.outgoing.records() for peer in self._directory.all()]
        return [*self.waiting, *(call for calls in by_peer for call in calls)]

    def timeout(
        self, pending: PendingCall, error: BaseException | None = None, note: str = ""
    ) -> RpcTimeout:
        """Return the error of a call whose deadline has passed; `error` is how that was noticed."""
        why = "" if pending.sent else _backlog(pending.peer, error)
        hint = self._limits.how_to_raise(pending.timeout, pending.inherited)
        return RpcTimeout(
            f"{ran_too_long(pending.timeout)}: {pending.name} on worker {pending.peer.name!r}{note}"
            f"{self._missing_link(pending.peer, error)}"
            f"{why}{self._shortage.describe(pending.peer)}{hint}"
        )

    def _missing_link(self, peer: Peer, error: BaseException | None) -> str:
        """Return, for messages, the addresses tried in vain, and the outcome of each attempt."""
        if peer.linked or peer.worker is self._status.me or not peer.worker.addresses:
            return ""
        tried = str(error) if isinstance(error, NotSent) else ""
        return f"; no link to it was made in time ({tried or ', '.join(peer.worker.addresses)})"

    def arrived(self, peer: Peer, answer: Frame) -> PendingCall | None:
        """Return the call whose answer arrived, or None if the call had ended already.

        The thread that gets the call says `coordinator.end` when it is done with it, callbacks
        included.
        """
        pending = peer.outgoing.outcome(answer.call_id)
        if pending is None or pending.is_noted:
            self._noted(peer, answer, pending)
        if self._says_slow and pending is not None:
            self._say_if_slow(pending)
        return pending

    def _noted(self, peer: Peer, answer: Frame, pending: PendingCall | None) -> None:
        """Tell the machine of an answer, to a call that it knows or that had ended already."""
        message: Any = answer.message  # Accepted, Reply or Failure
        if pending is not None and pending.created is not None:
            if type(message) is Accepted:
                self._references.accepted(pending.created)
            else:
                cause = Cancelled(f"worker {peer.name!r} did not make the value: {message}")
                self._references.creation_failed(pending.created, cause)
        answered = self._machine.state.answered
        self._machine.tell(answered, peer.incarnation, answer.call_id, pending, message)

    def _say_if_slow(self, pending: PendingCall) -> None:
        if not pending.timeout:
            return  # when it began is known by its deadline only
        seconds = time.monotonic() - (pending.deadline - pending.timeout)
        if seconds >= SLOW_SECONDS:
            logger.debug(
                "%s: %s on %r took %.3f s",
                self._status.me.name,
                pending.name,
                pending.peer.name,
                seconds,
            )

    def on_answer(self, peer: Peer, answer: Frame) -> None:
        """Take an answer that no thread waits for."""
        pending = self.arrived(peer, answer)
        if pending is None:
            return
        if pending.created is not None:
            self._coordinator.end(pending)
        elif answer.message.references:  # type: ignore[attr-defined]
            # The deadline goes on: an owner that does not answer must not make the call hang.
            self.waiting.add(pending)
            self.watch(pending)

            def admitted(error: CallError | None) -> None:
                self.waiting.discard(pending)
                self._complete(peer, answer, pending, error)

            self._arrive(peer, answer, admitted)
        elif (future := pending.future) is not None and future._callbacks:
            self._complete(peer, answer, pending, None)
        else:  # as `_complete` would, without a frame more for every call
            self._complete_now(peer, answer, pending, None)

    def _complete(
        self, peer: Peer, answer: Frame, pending: PendingCall, error: CallError | None
    ) -> None:
        future, executor = pending.future, self._executor
        if future is None or not future._callbacks:
            self._complete_now(peer, answer, pending, error)
            return
        # Callbacks count as a function that the call's own calls: what waits for them is less deep.
        depth = pending.depth + 1
        self._queued.add(pending)

        def complete() -> None:
            self._queued.discard(pending)
            token = set_context(CallContext(self._agent, depth=depth))
            try:
                with between_functions():
                    self._complete_now(peer, answer, pending, error)
            finally:
                reset_context(token)

        if executor.may_wait_here(depth):
            complete()
            return
        # No other thread could lead if a callback waited here.
        executor.submit(complete, depth)
        if self._status.is_closed:
            self.fail_queued(self._status.ended(peer))

    def is_answered(self, future: Future[Any]) -> bool:
        """Return whether a future is about to be completed, by the answer of its call."""
        return any(pending.future is future for pending in tuple(self._queued))

    def fail_queued(self, error: Exception) -> None:
        """Fail the calls that were answered and wait for a thread: the agent has ended."""
        while self._queued:
            with contextlib.suppress(KeyError):
                self._queued.pop().fail(error)

    def _complete_now(
        self, peer: Peer, answer: Frame, pending: PendingCall, error: CallError | None
    ) -> None:
        message = answer.message
        try:
            self._executor.begin_completion()
            if error is not None:
                raise error
            # In a thread of the agent: unpickling may run code of the user.
            if type(message) is Reply and not message.references and not message.sent:
                if len(answer.body) > NO_TENSOR_BYTES or answer.buffers:
                    clean_thread()
                value = self._serializer.load(
                    answer.body, answer.buffers, around=call_isolated, only=peer.only
                )
            else:
                value = call_isolated(partial(self.open, peer, answer))
            future = pending.future
            if future is not None:
                future.set_result(value)
            pending.future = None
        except BaseException as failure:  # of the call; or torch refuses the value
            pending.fail(failure)
        finally:
            self._coordinator.end(pending)

    def expire(self, pending: PendingCall) -> None:
        """End a watched call whose deadline has passed."""
        pending.watched = False
        peer, call_id = pending.peer, pending.call_id
        self._executor.allow_promotion()
        if peer.outgoing.peek(call_id) is None:
            # The answer is here, but waits for an owner that does not answer.
            late = self.timeout(pending, note=OWNER_IS_LATE)
            self._machine.stop_waiting(TransferKey(peer.incarnation, call_id, True), late)
        elif pending.created is None:
            self.abandon(pending, self.timeout(pending))
        else:
            # The owner may still make the value; until it says so, using the reference fails.
            self._references.creation_late(pending.created, self.timeout(pending))

    def on_peer_lost(self, loss: Loss) -> None:
        """End the calls to a lost peer, in PeerLost."""
        self.fail(loss.calls, loss.error)

    def fail(self, ended: Sequence[PendingCall], error: Exception) -> None:
        """End these calls, whose peer, or this agent, has ended."""
        for pending in ended:
            pending.fail(error)
            if pending.created is not None and isinstance(error, CallError):
                self._references.creation_failed(pending.created, error)
            self._coordinator.end(pending)

    def wait_for_references(self, peer: Peer, answer: Frame, pending: PendingCall) -> None:
        """Wait until the references in an answer may be used.

        Raises:
            OwnerDied: one can't.
            RpcTimeout: an owner does not say so by the deadline.
        """
        arrived: Waiter[CallError | None] = Waiter()
        self._arrive(peer, answer, arrived.deliver)
        try:
            error = arrived.wait(pending.deadline)
        except TimeoutError:
            key = TransferKey(peer.incarnation, answer.call_id, True)
            self._machine.stop_waiting(key, self.timeout(pending, note=OWNER_IS_LATE))
            error = arrived.wait(math.inf)
        if error is not None:
            raise error

    def _arrive(self, peer: Peer, answer: Frame, then: Continuation) -> None:
        key = TransferKey(peer.incarnation, answer.call_id, True)
        self._machine.arrive(key, answer.message, then)  # type: ignore[arg-type]

    def open(self, peer: Peer, answer: Frame) -> Any:
        """Return the value of an answer whose references may be used, or raise its error."""
        message = answer.message
        if type(message) is Reply and not message.references and not message.sent:
            return self._serializer.load(answer.body, answer.buffers, only=peer.only)
        if not isinstance(message, Reply | Failure):
            kind = type(message).__name__
            raise BadFrame(f"worker {peer.name!r} answered a call for a value with {kind}")
        handles = self._references.handles(message.references) if message.references else ()
        try:
            if isinstance(message, Reply):
                attach = None
                if message.sent:
                    attach = self._gradients.receive(message.context, peer, message.sent)
                return self._serializer.load(
                    answer.body,
                    answer.buffers,
                    references=handles,
                    attach=attach,
                    only=peer.only,
                )
            # In no variable: its traceback has this frame, and both would wait for the collector.
            raise self._translate(
                load_failure(
                    self._serializer,
                    message,
                    answer.body,
                    answer.buffers,
                    worker=peer.name,
                    references=handles,
                    only=peer.only,
                ),
                peer.worker.info,
            )
        finally:
            if message.references:
                self._machine.taken_over(TransferKey(peer.incarnation, answer.call_id, True))


def _backlog(peer: Peer, error: BaseException | None) -> str:
    """Return, for timeouts of calls that were not sent, the description of the backlog."""
    box = peer.outbox
    if box.is_idle:
        return ""
    if isinstance(error, NotSent) and str(error) and peer.linked:
        return f"; {error}"
    return f"; it was not sent: the worker does not read, and {len(box)} messages wait for it"
