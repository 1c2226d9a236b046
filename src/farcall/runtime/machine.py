"""The machine of an agent's calls and references: its lock, and the work done for it.

The machine is touched under the lock only. Its instructions are carried out after the lock is given
up, so that values (with whatever destructors they have) never die under it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from farcall.errors import CallError, Cancelled, OwnerDied
from farcall.ids import RefId
from farcall.protocol.instructions import (
    Answer,
    Drop,
    Follow,
    Instruction,
    Ready,
    Send,
    TransferKey,
)
from farcall.protocol.worker import WorkerMachine
from farcall.runtime.context import waiting
from farcall.runtime.control import ControlMessages
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.inquiries import Inquiries
from farcall.runtime.membership.lookup import LOOKUP_SECONDS
from farcall.runtime.membership.peers import IncomingCall, Peer, PendingCall
from farcall.runtime.references.values import ValueSlot
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor
from farcall.runtime.threads.isolation import call_isolated
from farcall.transport.waiter import Waiter
from farcall.wire.messages import Failure, Reply, Request

P = ParamSpec("P")
T = TypeVar("T")

Continuation = Callable[[CallError | None], None]


class Machine:
    """Tells the machine what happens, and does what it asks for. Thread-safe.

    Args:
        state: the machine.
        values: of the references that live here; the machine says when one is dropped.
        wake: wakes the leader of the agent.

    Attributes:
        lock: held around every use of `state`.
        state: the machine.
        ready: messages whose references can be used, or can't; see `go_on`.
        inquiries: what waits until the store has said where a worker is.
    """

    def __init__(
        self,
        state: WorkerMachine[PendingCall, IncomingCall],
        values: dict[RefId, ValueSlot],
        status: Status,
        directory: Directory,
        control: ControlMessages,
        executor: Executor,
        wake: Callable[[], None],
    ) -> None:
        self._status = status
        self._directory = directory
        self._control = control
        self._executor = executor
        self._values = values
        self._wake = wake
        self.lock = threading.Lock()
        self.state = state
        self._parked: dict[Hashable, Continuation] = {}  # by the key of the message
        self.ready: deque[tuple[Hashable, CallError | None]] = deque()
        self._confirmations: dict[Waiter[None], tuple[list[RefId], int]] = {}
        self.inquiries = Inquiries(status.me.name)

    def tell(self, event: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Tell the machine of something, and do what it asks for. Never called with the lock held.

        Args:
            event: a method of `state`, or of its `refs`; with its arguments.
        """
        with self.lock:
            result = event(*args, **kwargs)
            instructions = self.state.take()
            if self._confirmations:
                self._announce()
        if instructions:
            self._do(instructions)
        return result

    def run(self) -> None:
        """`tell` without an event: the machine was told of some before."""
        self.tell(_nothing)

    def end_calls(
        self, peer: Peer, cause: str
    ) -> tuple[Sequence[PendingCall], Sequence[IncomingCall]]:
        """Take the calls between this worker and a lost one out of the tables. See `Losses`."""
        with self.lock:
            ended = self.state.on_peer_lost(peer.incarnation, peer.left or cause)
        self._executor.allow_promotion()
        return ended

    def discard(self, incarnations: list[int]) -> None:
        """Drop all records of incarnations that were lost long ago."""
        with self.lock:
            self.state.discard(incarnations)

    def _do(self, instructions: Sequence[Instruction]) -> None:
        self._executor.allow_promotion()
        for instruction in instructions:
            # A `match` of six classes would take longer than all else here.
            if isinstance(instruction, Answer):
                self._control.answer(instruction.to, instruction.message, instruction.call_id)
            elif isinstance(instruction, Drop):
                call_isolated(partial(self._drop, instruction.ref))
            elif isinstance(instruction, Send):
                self._control.post(instruction.to, instruction.message, instruction.call_id)
            elif isinstance(instruction, Ready):
                self.ready.append((instruction.key, None))
            elif isinstance(instruction, Follow):
                self._control.follow(instruction.to, instruction.message, instruction.call_id)
            else:
                name, cause = instruction.owner_name, instruction.cause
                lost = OwnerDied(name, cause) if instruction.is_owner_lost else None
                self.ready.append((instruction.key, lost or no_value(name, cause)))
        if self.ready:
            self.go_on()

    def _drop(self, ref: RefId) -> None:
        """Let go of a value. Its finalizer may run here, and no lock is held."""
        value = self._values.pop(ref, None)
        if value is not None:
            value.drop()

    # References that must be confirmed before they go out.

    def wait_until_confirmed(self, refs: Iterable[RefId], owner: int, deadline: float) -> None:
        """Wait until all of the references may be sent, see `WorkerMachine.unconfirmed`.

        Args:
            refs: references that this worker uses.
            owner: the receiver of a request with them; 0 for an answer.
            deadline: `time.monotonic()` seconds.

        Raises:
            TimeoutError: the deadline passed.
        """
        with self.lock:
            unconfirmed = self.state.unconfirmed(refs, owner)
            if not unconfirmed:
                return
            confirmed: Waiter[None] = Waiter()
            self._confirmations[confirmed] = unconfirmed, owner
        try:
            with waiting():
                confirmed.wait(deadline)
        finally:
            with self.lock:
                self._confirmations.pop(confirmed, None)

    def _announce(self) -> None:
        """Tell those who wait until references are confirmed. Lock held."""
        for waiter, (refs, owner) in list(self._confirmations.items()):
            if not self.state.unconfirmed(refs, owner):
                del self._confirmations[waiter]
                waiter.deliver(None)

    # Messages with references.

    def arrive(
        self, key: TransferKey, message: Request | Reply | Failure, then: Continuation
    ) -> None:
        """Take a message with references. Call `then(None)` when it may be rebuilt, now or later.

        Its references get the incarnations that their owners have here. If an owner can't be found,
        the message is refused, and nothing else: that is no death.
        """
        message.references = self.state.localized(message.references)
        self._parked[key] = then
        self._arrive(key, message)

    def _arrive(self, key: TransferKey, message: Request | Reply | Failure) -> None:
        """Go on with a message when all owners of its references are known."""
        directory = self._directory
        for reference in message.references:
            if directory.of_incarnation(reference.owner) is None:
                self.inquiries.ask(
                    reference.owner,
                    partial(directory.meet, reference.owner_name, reference.owner),
                    time.monotonic() + LOOKUP_SECONDS,
                    lambda error, _: self.soon(partial(self._met, key, message, error)),
                )
                return
        self.tell(self.state.refs.arrive, key, message.references)

    def _met(
        self,
        key: TransferKey,
        message: Request | Reply | Failure,
        unknown: Exception | None,
        closed: CallError | None,
    ) -> None:
        """Go on with a message: the owner of one of its references is known now, or can't be."""
        error = closed or unknown
        if error is None:
            # The owner may have been discarded here, and be in its next meeting now.
            is_known = self._directory.of_incarnation
            message.references = tuple(
                one if is_known(one.owner) else self.state.localized((one,))[0]
                for one in message.references
            )
            self._arrive(key, message)
            return
        assert isinstance(error, CallError)  # `Directory.meet` raises no others
        self.tell(self.state.refs.asked, key)  # its sender keeps them no longer for us
        with self.lock:
            then = self._parked.pop(key, None)
        if then is not None:
            then(error)

    def stop_waiting(self, key: TransferKey, error: CallError) -> None:
        """Call `then(error)` of a message that waits for its owners, and is of no use any more."""
        with self.lock:
            then = self._parked.get(key)
            if then is None:
                return  # it goes on just now
            self._parked[key] = lambda gone: None if gone else self.taken_over(key)
        then(error)

    def taken_over(self, key: TransferKey) -> None:
        """Note that the message was rebuilt: its references have handles."""
        self.tell(self.state.refs.taken_over, key)

    def go_on(self) -> None:
        """Hand on the messages that waited for their references.

        That may run user functions, which take as long as they like and may even wait for one
        another: hence after all sending, and from a queue that the next leader goes on with.
        """
        while self.ready:
            try:
                key, error = self.ready.popleft()
            except IndexError:
                return  # another thread was faster
            if self.ready:
                self._wake()
            with self.lock:
                then = self._parked.pop(key, None)
            if then is not None:  # else the agent is closing
                then(error)

    def soon(self, then: Continuation) -> None:
        """Have the leader call `then(None)`; it must not wait. Destructors may call this: no locks.

        If the agent shuts down before, it is called with an error.
        """
        key = object()
        self._parked[key] = then
        self.ready.append((key, None))
        self._wake()
        if self._status.is_closed and self._parked.pop(key, None) is not None:
            then(self._status.closed_error())

    def close(self, error: CallError) -> None:
        """End every wait: the agent shuts down."""
        self.inquiries.close(error)
        with self.lock:
            parked, self._parked = self._parked, {}
            waiting, self._confirmations = self._confirmations, {}
        for confirmed in waiting:
            confirmed.deliver(None)
        for then in parked.values():
            then(OwnerDied(self._status.me.name, str(error)))


def no_value(owner_name: str, cause: str) -> Cancelled:
    """Return what use of a reference raises whose owner lives and does not have the value."""
    return Cancelled(f"worker {owner_name!r} does not have the value of this reference: {cause}")


def _nothing() -> None:
    pass
