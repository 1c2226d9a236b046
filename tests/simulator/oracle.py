"""The oracle of the simulator: knows everything, says what must not be.

It is told what user code sees (references handed out and given back, functions run, calls ended)
and what the machines ask for (values made and dropped), and judges by the invariants of
`farcall.protocol.refs`, `calls` and `worker`. Two words:

*lost*: one incarnation has declared the other dead, rightly or not. From that moment neither owes
the other anything: an owner forgets that holder, a holder gives that owner up. If both live they
may meet again, and begin anew; each meeting of the two has its own number (see `farcall.ids`).

*on its way*: a message with references, from the moment it is sent until its receiver's user code
has the references, the receiver refuses it, or the receiver would not accept it any more (a
request cancelled before it was seen, a reply to a caller that has given up). Whether copies of it
are still on the network does not matter: only the receiver can know.

Violations:

REF-1  a) A live worker's user code has a reference to a dropped value, or to one never made (its
          own `remote()` in the making excepted), and the owner lives and is not lost to it.
       b) A reference is on its way to a value that is dropped, or was never made, and sender,
          receiver and owner live and none of the three is lost to another.
       c) A message is refused for want of a value, with sender, receiver and owner as in b).
          Refusal is right when one of them is gone, or the request that makes the value was never
          sent; a reference in user code never dangles.
       A call whose caller has given up claims nothing by b) and c), if its request carries nothing
       but its receiver's values and is not one of `remote()`: its caller let them go.
REF-2  In the end, when nothing is lost any more and no program acts: an owner has an unused
       value, a worker has an entry for a reference that its user code doesn't have, or waits for
       an answer.
REF-5  is in REF-2: a handle of an earlier meeting with the owner makes no use of the present one.
REF-4  A value is dropped twice, made twice, or leaves its owner's table without a Drop.
CALL-1 A call has two outcomes; or none in the end, at a live caller.
CALL-2 A call runs twice.
WRK-5  A call begins to run after its callee has declared its caller lost.
CALL-3 A call begins to run after its caller, having given up, got the callee's answer; or an
       abandoned call is not closed in the end.
CALL-5 A caller that waits hears that its call was cancelled, but its function has run.

`check` looks at everything, after every event. REF-3 is that all this holds under faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

from farcall.ids import RefId, meeting_of, nth_incarnation, original
from farcall.protocol.calls import Outgoing
from farcall.protocol.instructions import TransferKey
from farcall.protocol.refs import Refs
from farcall.protocol.worker import WorkerMachine
from farcall.wire.messages import Reference
from simulator.schedule import Violation
from simulator.sim_records import Handle


class Transfer(NamedTuple):
    """A message with references, as the oracle sees it."""

    sender: int
    receiver: int
    call_id: int
    of_reply: bool
    meeting: int


class Watched(Protocol):
    """The part of a worker that the oracle looks at."""

    incarnation: int
    machine: WorkerMachine[Any, Any]
    refs: Refs
    handles: dict[Handle, int]
    owners: dict[RefId, int]

    def meeting_with(self, other: int) -> int:
        """Return the number of the present or last meeting with that worker."""

    @property
    def received(self) -> Mapping[TransferKey, tuple[object, Sequence[Reference]]]:
        """Messages that user code has not seen yet, with their references as it will see them."""

    @property
    def outgoing(self) -> Mapping[int, Outgoing[Any]]:
        """Its calls, by callee."""


class Value:
    """A remote value: its owner, and how far its life has got."""

    __slots__ = ("dropped", "made", "owner", "unsent")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.unsent = False
        self.made = False
        self.dropped = False


CallKey = tuple[int, int, int, int]  # caller, callee, meeting, call id


def _call_key(caller: int, callee: int, call_id: int) -> CallKey:
    """Name a call. Of the two workers, one is named as the other knows it."""
    meeting = max(meeting_of(caller), meeting_of(callee))
    return original(caller), original(callee), meeting, call_id


class CallFate:
    """The events of a call."""

    __slots__ = ("abandoned", "answered", "creates", "ends", "runs")

    def __init__(self, creates: bool) -> None:
        self.creates = creates
        self.runs = 0
        self.ends = 0
        self.abandoned = False
        self.answered = False


class Oracle:
    """Judge of one schedule."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.workers: dict[int, Watched] = {}
        self.values: dict[RefId, Value] = {}
        self._declared: set[tuple[int, int]] = set()  # who, whom
        self._ended: dict[frozenset[int], int] = {}  # of two workers: meetings until now that ended
        self._on_the_way: dict[Transfer, tuple[RefId, ...]] = {}
        # Of each of these: in which meeting with its owner the sender had the reference, and how
        # many meetings of the receiver with the owner had ended when it was sent.
        self._sent_at: dict[Transfer, dict[RefId, tuple[int, int]]] = {}
        self._calls: dict[CallKey, CallFate] = {}

    # Workers.

    def joined(self, worker: Watched) -> None:
        """Note that a worker begins to live."""
        self.workers[worker.incarnation] = worker

    def died(self, incarnation: int) -> None:
        """Note that a worker has vanished, with all it had."""
        del self.workers[incarnation]

    def on_peer_lost(self, worker: int, peer: int) -> None:
        """`worker` has declared `peer` dead, which is an incarnation as `worker` knows it."""
        self._declared.add((worker, peer))
        two = frozenset((worker, original(peer)))
        self._ended[two] = max(self._ended.get(two, 0), meeting_of(peer) + 1)

    # Values and references.

    def minted(self, ref: RefId, owner: int) -> None:
        """`remote()` was called, or a value is about to be owned."""
        self.values[ref] = Value(owner)

    def made(self, ref: RefId) -> None:
        """Note that the owner has made the value."""
        value = self.values[ref]
        if value.made:
            self._report("REF-4", f"{_name(ref)} is made a second time")
        if value.unsent:
            self._report("REF-4", f"{_name(ref)} is made, but its request was never sent")
        value.made = True

    def never_made(self, ref: RefId) -> None:
        """Note that the request that makes the value was not sent, and never will be."""
        self.values[ref].unsent = True

    def dropped(self, owner: int, ref: RefId) -> None:
        """Note that the owner was told to destroy the value."""
        value = self.values[ref]
        if value.dropped or not value.made or value.owner != owner:
            self._report("REF-4", f"{_name(ref)} is dropped, but worker {owner} does not have it")
        value.dropped = True

    def sent(self, transfer: Transfer, handles: Sequence[Handle]) -> None:
        """Note that a message with references goes off."""
        self._on_the_way[transfer] = tuple(handle.ref for handle in handles)
        self._sent_at[transfer] = {
            handle.ref: (
                meeting_of(handle.owner),
                self._ended_of(transfer.receiver, original(handle.owner)),
            )
            for handle in handles
        }

    def landed(self, transfer: Transfer) -> None:
        """User code has the references of this message, or will never ask for them."""
        self._on_the_way.pop(transfer, None)

    def refused(self, transfer: Transfer, cause: str) -> None:
        """Note that the receiver refused a message for want of a value."""
        refs = self._on_the_way.pop(transfer, ())
        if self._is_given_up(transfer, refs) or any(self.values[ref].unsent for ref in refs):
            return
        if refs and all(self._bound(transfer, ref) for ref in refs):
            self._report(
                "REF-1", f"{_describe(transfer)} is refused ({cause}), but sender and owners live"
            )

    def senders(self) -> list[int]:
        """Live workers with a message with references on its way."""
        return [t.sender for t in self._on_the_way if t.sender in self.workers]

    # Calls. A call is (caller, callee, call id), the one that does not tell of it as the other's.

    def begun(self, caller: int, callee: int, call_id: int, *, creates: bool) -> None:
        """Note that a call was given its id. `creates`: it is one of `remote()`."""
        self._calls[_call_key(caller, callee, call_id)] = CallFate(creates)

    def ran(self, caller: int, callee: int, call_id: int) -> None:
        """Note that the function of a call begins to run."""
        fate = self._calls[_call_key(caller, callee, call_id)]
        fate.runs += 1
        if (callee, caller) in self._declared:
            self._report("WRK-5", f"call {call_id} of {caller} runs at {callee}, which has lost it")
        if fate.runs > 1:
            self._report("CALL-2", f"call {call_id} of {caller} to {callee} runs again")
        if fate.abandoned and fate.answered:
            self._report("CALL-3", f"call {call_id} of {caller} to {callee} runs after its answer")

    def abandoned(self, caller: int, callee: int, call_id: int) -> None:
        """Note that the caller gives up. Its outcome is reported apart."""
        self._calls[_call_key(caller, callee, call_id)].abandoned = True

    def answered(self, caller: int, callee: int, call_id: int) -> None:
        """Note that an answer of the callee arrived, in time or late."""
        self._calls[_call_key(caller, callee, call_id)].answered = True

    def dismissed(self, caller: int, callee: int, call_id: int) -> None:
        """Note that a caller which waits hears that its call was cancelled."""
        if self._calls[_call_key(caller, callee, call_id)].runs:
            self._report("CALL-5", f"call {call_id} of {caller} to {callee} has run")

    def ended(self, caller: int, callee: int, call_id: int) -> None:
        """Note that the caller's record came out."""
        fate = self._calls[_call_key(caller, callee, call_id)]
        fate.ends += 1
        if fate.ends > 1:
            self._report("CALL-1", f"call {call_id} of {caller} to {callee} has {fate.ends} ends")

    # Judgement.

    def check(self) -> None:
        """Check the conditions that hold after every event."""
        values, workers = self.values, self.workers
        for ref, value in values.items():
            owner = workers.get(value.owner)
            if owner is not None and owner.refs.owns(ref) is not (value.made and not value.dropped):
                self._report("REF-4", f"{_name(ref)} came or went without being made or dropped")
        for incarnation, worker in workers.items():
            for handle in worker.handles:
                ref, value = handle.ref, values[handle.ref]
                if value.made and not value.dropped:
                    continue
                creating = not value.made and ref.minted_by == incarnation
                if not creating and self._has(worker, handle):
                    self._report("REF-1", f"worker {incarnation} has {_name(ref)}, which is gone")
        for transfer in [t for t in self._on_the_way if not self._is_live(t)]:
            del self._on_the_way[transfer]
        for transfer, refs in self._on_the_way.items():
            if self._is_given_up(transfer, refs):
                continue
            for ref in refs:
                value = values[ref]
                if value.made and not value.dropped:
                    continue
                # Over a FIFO link, a reference may follow the request that creates it.
                creating = not value.made and ref.minted_by == transfer.sender
                creating = creating and value.owner == transfer.receiver
                if not creating and self._bound(transfer, ref):
                    self._report("REF-1", f"{_describe(transfer)} carries {_name(ref)}, now gone")

    def check_end(self, discarded: Set[int] = frozenset()) -> None:
        """Check the conditions that hold when all is quiet and all dead are forgotten."""
        for incarnation, worker in self.workers.items():
            wanted = {
                handle.ref
                for handle in worker.handles
                if handle.owner != incarnation
                and handle.owner == worker.owners.get(handle.ref, handle.owner)
            }
            seen = worker.refs.statistics()
            expected = {"owned": len(self._used(incarnation)), "held": len(wanted)}
            expected |= dict.fromkeys(seen.keys() - expected.keys(), 0)
            if seen != expected:
                self._report("REF-2", f"worker {incarnation} ends with {seen}, not {expected}")
            used = {self.values[ref].owner for ref in wanted}
            if kept := discarded & set(map(original, worker.refs.losses)) - used:
                self._report(
                    "REF-2", f"worker {incarnation} remembers {kept}, of which it has nothing"
                )
            if not worker.refs.is_settled:
                self._report("REF-2", f"worker {incarnation} waits for an answer")
            for callee, outgoing in worker.outgoing.items():
                if len(outgoing) or list(outgoing.abandoned()):
                    self._report("CALL-3", f"worker {incarnation} has open calls to {callee}")
        for (caller, callee, _, call_id), fate in self._calls.items():
            if caller in self.workers and not fate.ends:
                self._report("CALL-1", f"call {call_id} of {caller} to {callee} has no outcome")

    def _used(self, owner: int) -> set[RefId]:
        """Return the values of this owner that user code of any worker not lost to it has."""
        return {
            handle.ref
            for worker in self.workers.values()
            for handle in worker.handles
            if original(handle.owner) == owner
            and self.values[handle.ref].made
            and self._has(worker, handle)
        }

    def _is_live(self, transfer: Transfer) -> bool:
        receiver = self.workers.get(transfer.receiver)
        return (
            receiver is not None
            and transfer.sender in self.workers
            and _would_accept(receiver, transfer)
        )

    def _is_given_up(self, transfer: Transfer, refs: Sequence[RefId]) -> bool:
        """Return whether the request has only values of its receiver, and no sender keeps one."""
        sender, receiver, call_id, of_reply, meeting = transfer
        if of_reply:
            return False
        fate = self._calls[sender, receiver, meeting, call_id]
        given_up = fate.abandoned and not fate.creates
        return given_up and all(self.values[ref].owner == receiver for ref in refs)

    def _has(self, worker: Watched, handle: Handle) -> bool:
        """Return whether the owner of a worker's reference lives, without a parting since then."""
        owner, meeting = original(handle.owner), meeting_of(handle.owner)
        return owner in self.workers and self._ended_of(worker.incarnation, owner) <= meeting

    def _bound(self, transfer: Transfer, ref: RefId) -> bool:
        """Return whether sender, receiver and owner live and have always believed in each other."""
        sender, receiver, owner = transfer.sender, transfer.receiver, self.values[ref].owner
        of_sender, of_receiver = self._sent_at[transfer][ref]
        if not self.workers.keys() >= {sender, receiver, owner}:
            return False
        return (
            self._ended_of(sender, receiver) <= transfer.meeting
            and self._ended_of(sender, owner) <= of_sender
            and self._ended_of(receiver, owner) == of_receiver
            and self._meeting_on_arrival(transfer, ref) >= of_receiver
        )

    def _meeting_on_arrival(self, transfer: Transfer, ref: RefId) -> int:
        """Return in which meeting with its owner the receiver has a reference, or would have it.

        The owner may have ended that meeting already, and the receiver not have heard of it.
        """
        worker = self.workers[transfer.receiver]
        sender = nth_incarnation(transfer.sender, transfer.meeting)
        key = TransferKey(sender, transfer.call_id, transfer.of_reply)
        for reference in worker.received.get(key, (None, ()))[1]:
            if Handle.of(reference).ref == ref:
                return meeting_of(reference.owner)
        return worker.meeting_with(self.values[ref].owner)

    def _ended_of(self, one: int, other: int) -> int:
        """Return how many meetings of two workers have ended."""
        return self._ended.get(frozenset((one, other)), 0)

    def _report(self, invariant: str, text: str) -> None:
        violation = Violation(invariant, text)
        if violation not in self.violations:
            self.violations.append(violation)


def _name(ref: RefId) -> str:
    return f"reference {ref}"


def _describe(transfer: Transfer) -> str:
    half = "reply" if transfer.of_reply else "request"
    return f"{half} {transfer.call_id} from {transfer.sender} to {transfer.receiver}"


def _would_accept(worker: Watched, transfer: Transfer) -> bool:
    """Return whether a worker would accept this message if it arrived now, or has accepted it."""
    _, _, call_id, of_reply, meeting = transfer
    sender = nth_incarnation(transfer.sender, meeting)
    if worker.machine.is_lost(sender) or meeting < worker.meeting_with(transfer.sender):
        return False
    if TransferKey(sender, call_id, of_reply) in worker.received:
        return True
    calls = worker.machine.calls_with(sender)
    if of_reply:
        return not calls.outgoing.is_closed(call_id)
    return not calls.incoming.has_seen(call_id)
