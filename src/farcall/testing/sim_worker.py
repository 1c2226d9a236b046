"""A simulated worker: the pure counterpart of the agent.

It does with `Refs`, `Outgoing` and `Incoming` what the agent does, but its "user code" only keeps
references, passes them on and lets them go, when `farcall.testing.simulation` says so. It tells
the oracle what user code sees.

Rules of the agent that the machines rely on, all of them here:

- A reference whose `remote()` is not yet accepted goes to nobody, for a third party's REGISTER may
  reach the owner before the request does. Over FIFO links, a later request to its owner may.
- A call whose references all live at the callee pins nothing: each is used once more until the
  call ends. `remote()` pins all the same.
- An ACCEPTED counts however late it comes, also when the call was abandoned.
- References that come in a reply nobody waits for are answered with RECEIVED at once.
- Messages from and to a lost incarnation are dropped.
- Every third function returns a future at once: a CANCEL is answered while the future is open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from farcall.ids import RefId
from farcall.protocol.calls import CancelResult, Incoming, Outgoing
from farcall.protocol.ref_entries import Drop, HeldState, Ready, Send, TransferKey, Unavailable
from farcall.testing.oracle import Oracle, Transfer
from farcall.testing.sim_records import Call, Machines, SendMessage, Task
from farcall.wire.messages import (
    Accepted,
    Cancel,
    Failure,
    Message,
    Pinned,
    Received,
    Reference,
    Register,
    Registered,
    Release,
    Released,
    Reply,
    Request,
)


class SimWorker:
    """One incarnation of a worker.

    Attributes:
        name: survives a restart; `incarnation` does not.
        label: both, for the log.
        handles: how many live `RRef`s user code has, by reference.
        tasks: functions that run.
        received: messages with references that user code has not seen yet.
        rebuildable: those of them that it may see now.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        machines: Machines,
        send: SendMessage,
        oracle: Oracle,
        random: Random,
        is_fifo: bool,
    ) -> None:
        self.name = name
        self.label = f"{name}#{incarnation}"
        self.incarnation = incarnation
        self.refs = machines.refs(incarnation)
        self.outgoing: defaultdict[int, Outgoing[Call]] = defaultdict(machines.outgoing)
        self.incoming: defaultdict[int, Incoming[Task]] = defaultdict(machines.incoming)
        self.lost: set[int] = set()
        self.handles: dict[RefId, int] = {}
        self.tasks: list[Task] = []
        self.received: dict[TransferKey, tuple[Task | None, Sequence[Reference]]] = {}
        self.rebuildable: list[TransferKey] = []
        self.patience = 0.7  # probability that user code takes a message over at once
        self._owners: dict[RefId, tuple[int, str]] = {}
        self._creations: dict[tuple[int, int], RefId] = {}
        self._failed: set[RefId] = set()
        self._send_message = send
        self._oracle = oracle
        self._draw = random.random
        self._is_fifo = is_fifo
        oracle.joined(self)

    def __repr__(self) -> str:
        return f"SimWorker({self.label})"

    # What user code does.

    def keep_value(self) -> RefId:
        """Make an `RRef` of a local value."""
        ref = self.refs.mint()
        self._oracle.minted(ref, self.incarnation)
        self._oracle.made(ref)
        self.refs.own(ref)
        self._owners[ref] = (self.incarnation, self.name)
        self.handles[ref] = 1
        return ref

    def create(self, owner: int, name: str, arguments: Sequence[RefId], fails: bool) -> RefId:
        """Call `remote()`. `fails`: the request can't be sent."""
        ref = self.refs.mint()
        self._oracle.minted(ref, owner)
        sequence = self.refs.create(ref, owner, name)
        self._owners[ref] = (owner, name)
        self.handles[ref] = 1
        self._call(owner, arguments, fails, ref, sequence)
        return ref

    def call(self, peer: int, arguments: Sequence[RefId], fails: bool) -> None:
        """Call a function with these references. `fails`: the request can't be sent."""
        self._call(peer, arguments, fails, None, 0)

    def copy(self, ref: RefId) -> None:
        """One more `RRef` to the same value."""
        self.refs.acquire(ref)
        self.handles[ref] += 1

    def discard(self, ref: RefId) -> None:
        """An `RRef` is collected."""
        self.handles[ref] -= 1
        if not self.handles[ref]:
            del self.handles[ref]
        self.refs.release(ref)
        self.pump()

    def abandon(self, peer: int, call_id: int) -> None:
        """A call times out."""
        call = self.outgoing[peer].peek(call_id)
        if call is not None and self.outgoing[peer].abandon(call_id, call):
            self._oracle.abandoned(self.incarnation, peer, call_id)
            self._send(peer, Cancel(), call_id)
            self._end(peer, call)
            self.pump()

    def finish(self, task: Task, results: Sequence[RefId], fails: bool) -> None:
        """A function returns these references, or raises an exception that has them."""
        self.tasks.remove(task)
        self._answer(task, Failure if fails else Reply, results)
        self.pump()

    def may_send(self, ref: RefId, peer: int, of_reply: bool) -> bool:
        """Whether the agent may put this reference into a request or reply to that peer now."""
        if ref in self._failed or self.refs.void_cause(ref) is not None:
            return False  # the agent raises the failure, or OwnerDied
        if self.refs.state(ref) is HeldState.CREATING:
            return self._is_fifo and not of_reply and self._owners[ref][0] == peer
        return True

    def rebuild(self, key: TransferKey) -> None:
        """User code takes over a received message."""
        self.rebuildable.remove(key)
        task, references = self.received.pop(key)
        refs = [RefId(reference.minted_by, reference.number) for reference in references]
        self._oracle.landed(Transfer(key.peer, self.incarnation, key.call_id, key.of_reply))
        if task is None or self._is_wanted(task):
            for ref, reference in zip(refs, references, strict=True):
                self.refs.acquire(ref)
                self._owners[ref] = (reference.owner, reference.owner_name)
                self.handles[ref] = self.handles.get(ref, 0) + 1
            if task is not None:
                task.arguments += refs
                self._start(task)
        if task is not None and task.has_uses:
            self._let_go(refs)
        else:
            self.refs.taken_over(key)
        self.pump()

    # What happens to it.

    def receive(self, peer: int, message: Message, call_id: int) -> None:
        """A message arrived."""
        if peer in self.lost:
            return
        HANDLERS[type(message)](self, peer, message, call_id)
        self.pump()

    def lose(self, peer: int) -> None:
        """A peer incarnation is declared dead."""
        self.lost.add(peer)
        self._oracle.lost(self.incarnation, peer)
        calls = self.outgoing.pop(peer).lost() if peer in self.outgoing else []
        tasks = self.incoming.pop(peer).lost() if peer in self.incoming else []
        self.tasks = [task for task in self.tasks if task not in tasks]
        for key in [key for key in self._creations if key[0] == peer]:
            del self._creations[key]
        self.refs.lost(peer, "lost")
        for call in calls:
            self._end(peer, call)
        self.pump()

    def tick(self) -> None:
        """Repeat what was not answered."""
        for peer, outgoing in self.outgoing.items():
            for call_id in outgoing.abandoned():
                self._send(peer, Cancel(), call_id)
        self.refs.tick()
        self.pump()

    def pump(self) -> None:
        """Do what the reference machine asks for, until it asks for nothing."""
        while instructions := self.refs.take():
            for instruction in instructions:
                match instruction:
                    case Send(to, message, call_id):
                        self._send(to, message, call_id)
                    case Drop(ref):
                        self._oracle.dropped(self.incarnation, ref)
                    case Ready(key):
                        self._ready(key)
                    case Unavailable(key, _, cause):
                        self._refuse(key, cause)

    # What the oracle looks at.

    def would_accept(self, transfer: Transfer) -> bool:
        sender, _, call_id, of_reply = transfer
        if sender in self.lost:
            return False
        if TransferKey(sender, call_id, of_reply) in self.received:
            return True
        if of_reply:
            return sender in self.outgoing and not self.outgoing[sender].is_closed(call_id)
        return sender not in self.incoming or not self.incoming[sender].has_seen(call_id)

    # Inside: the caller.

    def _call(
        self, peer: int, arguments: Sequence[RefId], fails: bool, ref: RefId | None, sequence: int
    ) -> None:
        outgoing = self.outgoing[peer]
        call = Call()
        call_id = call.call_id = outgoing.begin(call)
        self._oracle.begun(self.incarnation, peer, call_id, creates=ref is not None)
        key = TransferKey(peer, call_id, False)
        if ref is None and all(self._owners[argument][0] == peer for argument in arguments):
            self._keep(call, arguments)
        elif arguments:
            self.refs.pin(key, arguments)
        if fails:
            self._end(peer, call)
            if ref is not None:
                self._creation_failed(ref, "the request could not be sent", was_sent=False)
            self.refs.unpin(key)
            outgoing.retract(call_id, call)
        else:
            if ref is not None:
                self._creations[peer, call_id] = ref
            if arguments:
                self._oracle.sent(Transfer(self.incarnation, peer, call_id, False), arguments)
            number = 0 if ref is None else ref.number
            request = Request("f", 0.0, number, sequence, self._on_wire(arguments))
            self._send(peer, request, call_id)
        self.pump()

    def _keep(self, call: Call, arguments: Sequence[RefId]) -> None:
        for ref in arguments:
            self.refs.acquire(ref)
        call.kept = arguments

    def _end(self, peer: int, call: Call) -> None:
        """The record of a call came out."""
        self._oracle.ended(self.incarnation, peer, call.call_id)
        self._let_go(call.kept)

    def _on_outcome(self, peer: int, message: Reply | Failure | Accepted, call_id: int) -> None:
        record = self.outgoing[peer].outcome(call_id)
        self._oracle.answered(self.incarnation, peer, call_id)
        if record is not None:
            self._end(peer, record)
        self.refs.call_closed(TransferKey(peer, call_id, False))
        ref = self._creations.pop((peer, call_id), None)
        if isinstance(message, Accepted):
            if ref is not None:
                self.refs.accepted(ref)
            return
        if ref is not None:
            self._creation_failed(ref, "cancelled")
        if message.references:
            key = TransferKey(peer, call_id, True)
            if record is None:
                self.refs.asked(key)
            else:
                self._arrive(key, None, message.references)

    def _creation_failed(self, ref: RefId, cause: str, was_sent: bool = True) -> None:
        self._failed.add(ref)
        self.refs.creation_failed(ref, cause, was_sent)

    # Inside: the callee.

    def _on_request(self, peer: int, request: Request, call_id: int) -> None:
        task = Task(peer, call_id, bool(request.creates), is_deferred=call_id % 3 == 0)
        if not self.incoming[peer].request(call_id, task):
            return
        if request.creates:
            ref = RefId(peer, request.creates)
            self._oracle.made(ref)
            self.refs.accept_creation(ref, peer, request.sequence)
            self._oracle.ran(peer, self.incarnation, call_id)
            self.incoming[peer].finish(call_id)
            self._send(peer, Accepted(), call_id)
        if request.references:
            self._arrive(TransferKey(peer, call_id, False), task, request.references)
        else:
            self._start(task)

    def _on_cancel(self, peer: int, message: Cancel, call_id: int) -> None:
        result, task = self.incoming[peer].cancel(call_id)
        if result is CancelResult.ANSWER:
            self.refs.unpin(TransferKey(peer, call_id, True))
            self._send(peer, Failure("Cancelled", "cancelled", ""), call_id)
        elif task is not None and (not task.started or task.is_deferred):
            self._answer(task, Failure, ())  # a deferred one's future may complete later: `finish`

    def _start(self, task: Task) -> None:
        task.started = True
        if not task.is_creation:
            self._oracle.ran(task.caller, self.incarnation, task.call_id)
            self.tasks.append(task)

    def _is_wanted(self, task: Task) -> bool:
        """Whether a function whose arguments are complete shall run."""
        return task.caller not in self.lost and (task.is_creation or not task.answered)

    def _answer(self, task: Task, kind: type[Reply] | type[Failure], refs: Sequence[RefId]) -> None:
        task.answered = True
        caller, call_id = task.caller, task.call_id
        if caller in self.lost or not self.incoming[caller].finish(call_id):
            return
        if refs:
            self.refs.pin(TransferKey(caller, call_id, True), refs)
            self._oracle.sent(Transfer(self.incarnation, caller, call_id, True), refs)
        references = self._on_wire(refs)
        failure = Failure("Error", "failed", "", references)
        self._send(caller, Reply(references) if kind is Reply else failure, call_id)

    # Inside: references.

    def _arrive(self, key: TransferKey, task: Task | None, refs: Sequence[Reference]) -> None:
        self.received[key] = (task, refs)
        if task is not None and self.refs.take_own(refs):
            task.has_uses = True
            self._ready(key)
        else:
            self.refs.arrive(key, refs)

    def _ready(self, key: TransferKey) -> None:
        self.rebuildable.append(key)
        if self._draw() < self.patience:
            self.rebuild(key)

    def _refuse(self, key: TransferKey, cause: str) -> None:
        task, _ = self.received.pop(key)
        self._oracle.refused(Transfer(key.peer, self.incarnation, key.call_id, key.of_reply), cause)
        if task is not None and not task.is_creation:
            self._answer(task, Failure, ())

    def _let_go(self, refs: Sequence[RefId]) -> None:
        for ref in refs:
            self.refs.release(ref)

    def _on_wire(self, refs: Sequence[RefId]) -> tuple[Reference, ...]:
        return tuple(Reference(ref.minted_by, ref.number, *self._owners[ref], 0) for ref in refs)

    def _send(self, to: int, message: Message, call_id: int) -> None:
        if to not in self.lost:
            self._send_message(self.incarnation, to, message, call_id)

    def _on_pinned(self, peer: int, message: Pinned, call_id: int) -> None:
        if message.of_reply:
            arrived = self.outgoing[peer].is_closed(call_id)
        else:
            arrived = self.incoming[peer].has_seen(call_id)
        if arrived:
            self.refs.asked(TransferKey(peer, call_id, message.of_reply))


HANDLERS: dict[type[Message], Callable[[SimWorker, int, Any, int], None]] = {
    Request: SimWorker._on_request,
    Reply: SimWorker._on_outcome,
    Failure: SimWorker._on_outcome,
    Accepted: SimWorker._on_outcome,
    Cancel: SimWorker._on_cancel,
    Register: lambda worker, peer, message, _: worker.refs.on_register(peer, message.entries),
    Registered: lambda worker, peer, message, _: worker.refs.on_registered(message.entries),
    Release: lambda worker, peer, message, _: worker.refs.on_release(peer, message.entries),
    Released: lambda worker, peer, message, _: worker.refs.on_released(message.entries),
    Received: lambda worker, peer, message, call_id: worker.refs.unpin(
        TransferKey(peer, call_id, message.of_reply)
    ),
    Pinned: SimWorker._on_pinned,
}
