"""A simulated worker: the machine that agents run, and a user in the place of threads and links.

Its "user code" only keeps references, passes them on and lets them go, when
`simulator.simulation` says so. It tells the oracle what user code sees.

An agent's work outside of the machine is done here, too:

- A handle of a reference is a use of it (`Refs.acquire`, `release`). A call that needs no pins has
  handles of its references until it ends, and a function has handles of its arguments.
- A message that goes the way of requests may wait in a box until there is a link, and all that
  follows waits behind it (`protocol.outbox`). Of a call that ends meanwhile the request is not
  sent; or it is, if its turn came in the same moment.
- Every third function returns a future at once, which is not waited for after a CANCEL.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from farcall.ids import RefId, meeting_of, nth_incarnation, original
from farcall.protocol.calls import Outgoing
from farcall.protocol.instructions import (
    Answer,
    Drop,
    Follow,
    Ready,
    Send,
    TransferKey,
    Unavailable,
)
from farcall.protocol.worker import WorkerMachine
from farcall.wire.messages import (
    CANCELLED,
    Accepted,
    Cancel,
    Failure,
    Message,
    Reference,
    Reply,
    Request,
)
from simulator.oracle import Oracle, Transfer
from simulator.sim_records import Call, Handle, Machines, SendMessage, Task


class SimWorker:
    """One incarnation of a worker.

    Attributes:
        name: survives a restart; `incarnation` does not.
        label: both, for the log.
        machine: as in an agent.
        handles: what user code has, and how many of each.
        owners: the incarnation of its owner with which each reference arrived last.
        tasks: functions that run.
        received: messages with references that user code has not seen yet.
        rebuildable: those of them that it may see now.
        discarded: the dead of whom nothing is remembered here.
        calls: those that were made from here, by callee and id.
        boxes: what waits for the link to a peer: requests with their calls, and what follows.
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
        self.machine: WorkerMachine[Call, Task] = machines.worker(
            incarnation,
            refs=machines.refs,
            outgoing=machines.outgoing,
            incoming=machines.incoming,
        )
        self.refs = self.machine.refs
        self.handles: dict[Handle, int] = {}
        self.owners: dict[RefId, int] = {}
        self.tasks: list[Task] = []
        self.received: dict[TransferKey, tuple[Task | None, Sequence[Reference]]] = {}
        self.rebuildable: list[TransferKey] = []
        self.boxes: defaultdict[int, deque[tuple[Follow, Call | None]]] = defaultdict(deque)
        self.discarded: set[int] = set()
        self.calls: dict[tuple[int, int], Call] = {}
        self.patience = 0.7  # probability that user code takes a message over at once
        self._meetings: dict[int, int] = {}
        self._send_message = send
        self._oracle = oracle
        self._draw = random.random
        self._is_fifo = is_fifo
        oracle.joined(self)

    def __repr__(self) -> str:
        return f"SimWorker({self.label})"

    @property
    def outgoing(self) -> Mapping[int, Outgoing[Any]]:
        """The calls from here, by callee."""
        return {peer: calls.outgoing for peer, calls in self.machine.peers()}

    # Actions of user code.

    def keep_value(self) -> Handle:
        """Make an `RRef` of a local value."""
        ref = self.refs.mint()
        self._oracle.minted(ref, self.incarnation)
        self._oracle.made(ref)
        self.refs.own(ref)
        handle = Handle(ref, self.incarnation, self.name)
        self.handles[handle] = 1
        return handle

    def create(self, owner: int, name: str, arguments: Sequence[Handle], how: str) -> Handle:
        """Call `remote()`. `how`: see `call`."""
        ref = self.refs.mint()
        self._oracle.minted(ref, original(owner))
        sequence = self.refs.create(ref, owner, name)
        handle = Handle(ref, owner, name)
        self.handles[handle] = 1
        self._call(owner, arguments, how, ref, sequence)
        return handle

    def call(self, peer: int, arguments: Sequence[Handle], how: str) -> None:
        """Call a function with these references.

        Args:
            how: the request is "sent", "waits" for the link, or "fails": it can't be sent; or the
                peer is "lost" before.
        """
        self._call(peer, arguments, how, None, 0)

    def copy(self, handle: Handle) -> None:
        """Make one more `RRef` to the same value."""
        self.refs.acquire(handle.ref, handle.owner)
        self.handles[handle] += 1

    def discard(self, handle: Handle) -> None:
        """Collect an `RRef`."""
        self.handles[handle] -= 1
        if not self.handles[handle]:
            del self.handles[handle]
        self._let_go([handle])
        self.pump()

    def abandon(self, peer: int, call_id: int) -> None:
        """Time out a call."""
        call = self.calls.get((peer, call_id))
        if call is not None:
            if self.machine.abandon(peer, call_id, call):
                self._oracle.abandoned(self.incarnation, peer, call_id)
                self._end(peer, call)
            self.pump()

    def ask_to_end(self, peer: int, call_id: int) -> None:
        """Cancel a call, as the program does, while a thread goes on waiting for its outcome."""
        call = self.calls.get((peer, call_id))
        if call is not None and call.sent and call.created is None:
            call.cancelled = True
            self.machine.ask_to_end(peer, call_id, call)
            self.pump()

    def finish(self, task: Task, results: Sequence[Handle], fails: bool) -> None:
        """End a function, which returns these references, or raises an exception that has them."""
        self.tasks.remove(task)
        self._answer(task, Failure if fails else Reply, results)
        self.pump()

    def may_send(self, handle: Handle, peer: int, of_reply: bool) -> bool:
        """Return whether the agent may now put this reference into a request or reply to a peer."""
        # Where links don't keep the order, a request may overtake the one that makes the reference.
        owner = peer if self._is_fifo and not of_reply else 0
        if not self.refs.is_usable(handle.ref, handle.owner):
            return False
        return not self.machine.unconfirmed([handle.ref], owner)

    def rebuild(self, key: TransferKey) -> None:
        """User code takes over a received message."""
        self.rebuildable.remove(key)
        task, references = self.received.pop(key)
        handles = [Handle.of(reference) for reference in references]
        self._oracle.landed(self._transfer_from(key))
        if task is None or self._is_wanted(task):
            for handle in handles:
                self.refs.acquire(handle.ref, handle.owner)
                self.handles[handle] = self.handles.get(handle, 0) + 1
            if task is not None:
                task.arguments += handles
                self._start(task)
        if task is not None and task.has_uses:
            self._let_go(handles)
        else:
            self.refs.taken_over(key)
        self.pump()

    # Events at the worker.

    def receive(self, peer: int, message: Message, call_id: int) -> None:
        """Act on a message that arrived."""
        match message:
            case Request():
                self._on_request(peer, message, call_id)
            case Reply() | Failure() | Accepted():
                self._on_answer(peer, message, call_id)
            case Cancel():
                self._on_cancel(peer, call_id, message)
            case _:
                self.machine.on_message(peer, message, call_id)
        self.pump()

    def on_peer_lost(self, peer: int) -> None:
        """Declare a peer incarnation dead."""
        self._oracle.on_peer_lost(self.incarnation, peer)
        self.boxes.pop(peer, None)
        calls, tasks = self.machine.on_peer_lost(peer, "lost")
        self.tasks = [task for task in self.tasks if task not in tasks]
        for task in tasks:
            task.is_over = True
        for call in calls:
            self._end(peer, call)
        self.pump()

    def meet_again(self, other: int, meeting: int) -> None:
        """Meet a worker again that was lost, since there is a link to it."""
        self._meetings[other] = meeting
        self.machine.meet(nth_incarnation(other, meeting))
        self.pump()

    def discard_peer(self, other: int) -> None:
        """Discard a dead worker that was lost long ago: no message of it is on its way any more."""
        self.discarded.add(other)
        meetings = range(self.meeting_with(other) + 1)
        self.machine.discard([nth_incarnation(other, meeting) for meeting in meetings])

    def now(self, other: int) -> int:
        """Return the incarnation that another worker has here."""
        return nth_incarnation(other, self.meeting_with(other))

    def open_box(self, peer: int, is_late: bool) -> None:
        """Send what waits for a link, now that there is one.

        Args:
            is_late: a request is sent, too, whose call was given up while its turn came.
        """
        box = self.boxes.pop(peer)
        calls = self.machine.calls_with(peer)
        for follow, call in box:
            is_over = call is not None and calls.outgoing.peek(call.call_id) is not call
            if call is not None and is_over and not is_late:
                self._retract(peer, call)
                continue
            self._send_message(self.incarnation, follow)
            if call is not None:
                call.sent = True
                self.machine.sent_late(peer, call.call_id, call)
        self.pump()

    def tick(self) -> None:
        """Repeat unanswered messages, once all are sent: no peer has heard of an unsent one."""
        if not self.boxes:
            self.machine.tick()
            self.pump()

    def pump(self) -> None:
        """Do what the machine asks for, until it asks for nothing."""
        while instructions := self.machine.take():
            for instruction in instructions:
                match instruction:
                    case Follow():
                        self._follow(instruction, None)
                    case Send() | Answer():
                        self._send_message(self.incarnation, instruction)
                    case Drop(ref):
                        self._oracle.dropped(self.incarnation, ref)
                    case Ready(key):
                        self._ready(key)
                    case Unavailable(key, _, cause, _):
                        self._refuse(key, cause)

    # Questions of the oracle.

    def meeting_with(self, other: int) -> int:
        return self._meetings.get(other, 0)

    def has_parted(self, other: int, meeting: int) -> bool:
        """Return whether a meeting with another worker has ended here."""
        now = self.meeting_with(other)
        return now > meeting or (now == meeting and self.machine.is_lost(self.now(other)))

    # Inside: the caller.

    def _call(
        self, peer: int, arguments: Sequence[Handle], how: str, ref: RefId | None, sequence: int
    ) -> None:
        outgoing = self.machine.calls_with(peer).outgoing
        call = Call(ref)
        call_id = call.call_id = outgoing.begin(call)
        self.calls[peer, call_id] = call
        self._oracle.begun(self.incarnation, peer, call_id, creates=ref is not None)
        if self.machine.is_lost(peer):
            if outgoing.outcome(call_id) is not None:
                self._end(peer, call)
            self._retract(peer, call)
            self.pump()
            return
        references = tuple(argument.on_wire for argument in arguments)
        if how == "lost":
            self.on_peer_lost(peer)
        if not self.machine.needs_pins(references, peer, creates=ref is not None):
            self._keep(call, arguments)
        elif arguments:
            call.is_noted = True
            self.machine.pin(peer, call_id, [argument.ref for argument in arguments])
        if how == "lost":
            self._let_go(call.kept)
        elif how == "fails":
            self._retract(peer, call)
        else:
            if arguments:
                self._oracle.sent(self._transfer_to(peer, call_id, of_reply=False), arguments)
            number = b"" if ref is None else ref.number
            request = Request("f", 0.0, number, sequence, references)
            if how == "waits":
                self.boxes[peer]  # there is no link
            call.sent = self._follow(Follow(peer, request, call_id), call)
        self.pump()

    def _follow(self, follow: Follow, call: Call | None) -> bool:
        """Send something by the way of requests, unless it has to wait. Whether it was sent."""
        if follow.to in self.boxes:
            self.boxes[follow.to].append((follow, call))
            return False
        self._send_message(self.incarnation, follow)
        return True

    def _retract(self, peer: int, call: Call) -> None:
        self._oracle.landed(self._transfer_to(peer, call.call_id, of_reply=False))
        if call.created is not None:
            self._oracle.never_made(call.created)
        if self.machine.retract(peer, call.call_id, call, "the request could not be sent"):
            self._end(peer, call)

    def _keep(self, call: Call, arguments: Sequence[Handle]) -> None:
        for handle in arguments:
            self.refs.acquire(handle.ref, handle.owner)
        call.kept = arguments

    def _end(self, peer: int, call: Call) -> None:
        """Take in that the record of a call has ended."""
        self._oracle.ended(self.incarnation, peer, call.call_id)
        self._let_go(call.kept)

    def _on_answer(self, peer: int, message: Reply | Failure | Accepted, call_id: int) -> None:
        call = self.machine.calls_with(peer).outgoing.outcome(call_id)
        if not self.machine.is_lost(peer):
            self._oracle.answered(self.incarnation, peer, call_id)
        if call is not None:
            if isinstance(message, Failure) and message.type_name == CANCELLED:
                self._oracle.dismissed(self.incarnation, peer, call_id)
            self._end(peer, call)
        is_arriving = self.machine.answered(peer, call_id, call, message)
        if is_arriving and not isinstance(message, Accepted):
            key = TransferKey(peer, call_id, True)
            self._arrive(key, None, message.references)

    # Inside: the callee.

    def _on_request(self, peer: int, request: Request, call_id: int) -> None:
        task = Task(peer, call_id, request)
        if not self.machine.calls_with(peer).incoming.request(call_id, task):
            return
        created = self.machine.created_by(peer, request)
        if created is not None:
            self._oracle.made(created)
            self._oracle.ran(peer, self.incarnation, call_id)
        key = TransferKey(peer, call_id, False)
        task.has_uses = self.machine.admit(
            peer, call_id, request.references, created, request.sequence
        )
        if not request.references:
            self._start(task)
            return
        if task.has_uses:
            self.received[key] = (task, request.references)
            self._ready(key)
        else:
            self._arrive(key, task, request.references)

    def _on_cancel(self, peer: int, call_id: int, message: Cancel) -> None:
        task = self.machine.cancelled(peer, call_id, waits=message.waits)
        if task is not None and (not task.is_started or task.is_deferred):
            self._answer(task, Failure, ())  # a deferred one's future may complete later: `finish`

    def _start(self, task: Task) -> None:
        task.is_started = True
        if not task.is_creation:
            self._oracle.ran(task.caller, self.incarnation, task.call_id)
            self.tasks.append(task)

    def _is_wanted(self, task: Task) -> bool:
        """Return whether a function whose arguments are complete shall run."""
        return not self.machine.is_lost(task.caller) and (task.is_creation or not task.is_over)

    def _answer(
        self, task: Task, kind: type[Reply] | type[Failure], handles: Sequence[Handle]
    ) -> None:
        task.is_over = True
        caller, call_id = task.caller, task.call_id
        if not self.machine.answer(caller, call_id, [handle.ref for handle in handles]):
            return
        if handles:
            self._oracle.sent(self._transfer_to(caller, call_id, of_reply=True), handles)
        references = tuple(handle.on_wire for handle in handles)
        failure = Failure("Error", "failed", "", references)
        answer = Reply(references) if kind is Reply else failure
        self._send_message(self.incarnation, Answer(caller, answer, call_id))

    # Inside: references.

    def _arrive(self, key: TransferKey, task: Task | None, on_wire: tuple[Reference, ...]) -> None:
        references = self.machine.localized(on_wire)
        self.received[key] = (task, references)
        if any(reference.owner in self.discarded for reference in on_wire):
            # The agent looks them up, and does not find them.
            self.refs.asked(key)
            self._refuse(key, "an owner is not in the group any more")
        else:
            self.owners.update((Handle.of(one).ref, one.owner) for one in references)
            self.refs.arrive(key, references)

    def _ready(self, key: TransferKey) -> None:
        self.rebuildable.append(key)
        if self._draw() < self.patience:
            self.rebuild(key)

    def _refuse(self, key: TransferKey, cause: str) -> None:
        task, _ = self.received.pop(key)
        self._oracle.refused(self._transfer_from(key), cause)
        if task is not None and not task.is_creation:
            self._answer(task, Failure, ())

    def _let_go(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self.refs.release(handle.ref, handle.owner)

    def _transfer_to(self, peer: int, call_id: int, *, of_reply: bool) -> Transfer:
        return Transfer(self.incarnation, original(peer), call_id, of_reply, meeting_of(peer))

    def _transfer_from(self, key: TransferKey) -> Transfer:
        peer, call_id, of_reply = key
        return Transfer(original(peer), self.incarnation, call_id, of_reply, meeting_of(peer))
