"""Count which processes hold which remote value, and decide when the value may go.

*Owner*: the process that has the value. *Holder*: another process with a live `RRef` to it. We
count per process, not per `RRef` and not per copy sent, as in Birrell et al., "Network Objects"
(SOSP 1993) with the sequence numbers of "Distributed Garbage Collection for Network Objects" (SRC
116): the count survives loss, duplication, reordering and death.

A holder's entry for a reference it does not own:

    state        event                         next         effect
    -----------  ----------------------------  -----------  -------------------------------------
    -            create (it calls remote())    CREATING     the request registers us
    -            arrive (in a message)         REGISTERING  REGISTER to the owner
    CREATING     accepted                      CONFIRMED    messages waiting for it are handed on
    CREATING     creation failed               CREATING     REGISTER to the owner (see below)
    CREATING     creation was never sent       VOID         messages waiting for it are refused
    CREATING     registered, known             CONFIRMED    messages waiting for it are handed on
    CREATING     registered, unknown           VOID         messages waiting for it are refused
    REGISTERING  registered, known             CONFIRMED    messages waiting for it are handed on
    REGISTERING  registered, unknown           VOID         messages waiting for it are refused
    any          owner lost                    VOID         messages waiting for it are refused
    CONFIRMED    no local use, no pin          -            RELEASE to the owner
    VOID         no local use, no pin          -
    any          arrive; the owner was lost,   REGISTERING  a new entry: REGISTER to the owner
                 and was met again

An owner that was met again is another incarnation, and an entry belongs to one incarnation. So each
local use names the incarnation that the owner had when the use began. A handle of an earlier
meeting stays void: if it counted in the new entry, a useless reference would keep the value alive.

A message that carries references is a *transfer*. The sender pins the references until the receiver
says RECEIVED: once the receiver is registered as a holder (or is the owner). A reference that
arrives from a third party is handed to user code only when the owner has confirmed it: the owner
alone decides, so a sender that dies mid-way can leave no worker with a reference to a value that is
gone. A reference that arrives from the owner is handed on at once, since the owner's pin covers the
wait. A request that carries nothing but its receiver's own references needs no RECEIVED: the call's
outcome says the same. An ordinary call with such a request is no transfer at all: the caller's own
use keeps the references until the call ends, and the receiver uses them at once (`take_own`).

A holder sends RELEASE only after its registration was confirmed, so a RELEASE can't overtake the
REGISTER that it ends; and sequence numbers grow, so neither can be mistaken for a later one.

A `remote()` call that failed may have been accepted all the same: the ACCEPTED may be lost, or come
after the answer to a CANCEL. A holder that believed the failure would leave the owner with a value
forever. So the holder asks, with a REGISTER of the creation's own sequence number. And until the
owner has confirmed a creation, the reference goes to no worker (over a FIFO link, to its owner
alone): a third party's REGISTER could be there before the request, and be refused.

Invariants (tests cite them):

REF-1  While any process holds a live reference, or one is in flight from a live sender, the
       owner keeps the value.
REF-2  When no such reference is left, the owner drops the value, in bounded time, outside every
       lock.
REF-3  Loss, duplication, reordering and death of any message or process break neither REF-1 nor
       REF-2 (a lost owner excepted).
REF-4  Values are destroyed exactly once.
REF-5  A use here, or a pin, counts in the meeting with the owner in which it began, and in no later
       one.

Methods take events. The resulting instructions collect in order, with REGISTER and RELEASE batched
per owner, until `take` returns them. The methods are not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farcall.ids import RefId, RefNumber
from farcall.protocol.instructions import (
    Drop,
    Instruction,
    Ready,
    Send,
    TransferKey,
    Unavailable,
)
from farcall.protocol.ref_entries import Arrival, Held, HeldState, Owned
from farcall.protocol.ref_tables import PARTED, RefTables
from farcall.wire.messages import Entry, Pinned, Received, Reference, Registered, Released


class Refs(RefTables):
    """The references of one worker incarnation: those it owns and those it holds.

    Attributes:
        losses: incarnations that are gone for good, and why.
    """

    # Instructions.

    def take(self) -> list[Instruction]:
        """Return the instructions since the last call, in order; registrations come first."""
        return self._to_do.take()

    # Local use: live RRefs, counted by the caller's handles.

    def own(self, ref: RefId) -> None:
        """Add a value that was made here, used once."""
        self._owned[ref] = Owned(local=1)

    def create(self, ref: RefId, owner: int, owner_name: str) -> int:
        """Begin a reference, used once here: its `remote()` call is being sent.

        Returns:
            The sequence number of the registration.
        """
        held = self._hold(ref, owner, owner_name, HeldState.CREATING)
        held.local = 1
        if owner in self.losses:
            self._void(ref, held, self.losses[owner])
        return held.sequence

    def acquire(self, ref: RefId, owner: int) -> None:
        """Count one more local use of a reference that is in use.

        Args:
            ref: which.
            owner: the incarnation that its owner had here when it arrived, see REF-5.
        """
        entry = self._entry(ref, owner)
        if entry is not None:
            entry.local += 1

    def release(self, ref: RefId, owner: int) -> None:
        """Count one local use less; the arguments are those of `acquire`."""
        owned = self._owned.get(ref)
        if owned is not None:
            owned.local -= 1
            self._drop_if_free(ref, owned)
            return
        held = self._held.get(ref)
        if held is not None and held.owner == owner:
            held.local -= 1
            self._release_if_free(ref, held)

    # Creation by remote().

    def accept_creation(self, ref: RefId, holder: int, sequence: int) -> None:
        """Register the caller of a `remote()` request that arrived at the owner."""
        owned = self._owned[ref] = Owned()
        if holder not in self.losses:
            owned.note(holder, sequence, holds=True)
        self._drop_if_free(ref, owned)

    def accepted(self, ref: RefId) -> None:
        """Hear, as the holder, that the owner has made the value's slot."""
        held = self._held.get(ref)
        if held is not None and held.state is HeldState.CREATING:
            self._confirm(ref, held)

    def creation_failed(self, ref: RefId, cause: str, was_sent: bool = True) -> None:
        """Holder: the call ended without ACCEPTED: ask the owner if it is so. Or it was never sent.

        The call must be closed: only what can't be accepted any more may be asked for.
        """
        held = self._held.get(ref)
        if held is not None and held.state is HeldState.CREATING:
            held.cause = cause or "its creation failed"
            if was_sent:
                self._to_do.register(held.owner, (*ref, held.sequence))
            else:
                self._void(ref, held, held.cause)

    # Transfers: the sender.

    def pin(self, key: TransferKey, refs: Sequence[RefId]) -> None:
        """Pin the references of a message that is about to be sent to `key.peer`."""
        if key.peer in self.losses:
            return  # it was lost meanwhile: nothing would ever unpin them
        entries = [(ref, self._owned.get(ref) or self._held.get(ref)) for ref in refs]
        # Of a use that is of an earlier meeting since a moment ago, there may be none.
        pinned = tuple((ref, entry) for ref, entry in entries if entry is not None)
        only_receivers_own = not key.of_reply
        for _, entry in pinned:
            entry.pins += 1
            owner = entry.owner if isinstance(entry, Held) else self._me
            only_receivers_own = only_receivers_own and owner == key.peer
        self.transfers[key] = (pinned, only_receivers_own)

    def unpin(self, key: TransferKey) -> None:
        """Let go of the pins: RECEIVED arrived, or the message could not be sent."""
        pinned, _ = self.transfers.pop(key, ((), False))
        for ref, entry in pinned:
            entry.pins -= 1
            self._let_go_if_free(ref, entry)

    def call_closed(self, key: TransferKey) -> None:
        """Take a call's outcome, which says RECEIVED too if nothing was to be registered."""
        transfer = self.transfers.get(key)
        if transfer is not None and transfer[1]:
            self.unpin(key)

    # Transfers: the receiver.

    def arrive(self, key: TransferKey, references: Sequence[Reference]) -> None:
        """Hear that a message with references arrived from `key.peer`.

        Ready or Unavailable follows, now or later. Until `taken_over` or Unavailable, the
        references count as used here.
        """
        needs_answer = key.of_reply or any(r.owner != self._me for r in references)
        arrival = Arrival(key, [], needs_answer)
        gone: tuple[str, str, bool] | None = None
        for wire_ref in references:
            ref = RefId(wire_ref.minted_by, wire_ref.number)
            if wire_ref.owner == self._me:
                owned = self._owned.get(ref)
                if owned is None:
                    gone = (wire_ref.owner_name, "it has dropped the value", False)
                    continue
                owned.local += 1
            else:
                held = self._held.get(ref)
                if held is not None and held.owner != wire_ref.owner:
                    self._void(ref, held, PARTED)  # this may come before its loss is told
                    held = None
                if held is None:
                    held = self._hold(
                        ref, wire_ref.owner, wire_ref.owner_name, HeldState.REGISTERING
                    )
                    self._register(ref, held)
                held.local += 1
                if held.state is HeldState.VOID:
                    gone = (held.owner_name, held.cause, held.owner in self.losses)
                elif held.state is not HeldState.CONFIRMED:
                    held.waiting += (arrival,)
                    arrival.unconfirmed += 1
                    arrival.blocking += wire_ref.owner != key.peer
            arrival.claimed.append((ref, wire_ref.owner))
        self._arrivals[key] = arrival
        if gone is not None:
            self._refuse(arrival, *gone)
        self._advance(arrival)

    def take_own(self, references: Sequence[Reference]) -> bool:
        """Count one more use of each reference of a request; all of them live here.

        There is nothing to register or to wait for then, so neither `arrive` nor `taken_over`
        follows. Return False, without side effects, if any reference has another owner.
        """
        owned = [
            self._owned.get(RefId(r.minted_by, r.number)) if r.owner == self._me else None
            for r in references
        ]
        for entry in owned:
            if entry is None:
                return False
        for entry in owned:
            entry.local += 1  # type: ignore[union-attr]
        return True

    def taken_over(self, key: TransferKey) -> None:
        """End the uses of a message that was rebuilt: its references have uses of their own now."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            self._unclaim(arrival)
            self._discard_if_done(arrival)

    def asked(self, key: TransferKey) -> None:
        """PINNED arrived for a message that can't arrive (again): say RECEIVED unless we wait."""
        arrival = self._arrivals.get(key)
        if arrival is None or not arrival.unconfirmed:
            self._to_do.say(Send(key.peer, Received(key.of_reply), key.call_id))

    # Messages of the protocol.

    def on_register(self, holder: int, entries: Iterable[Entry]) -> None:
        """Handle REGISTER, as the owner."""
        if holder in self.losses:
            return
        answers = []
        for minted_by, number, sequence in entries:
            owned = self._owned.get(RefId(minted_by, number))
            if owned is None:
                answers.append((minted_by, number, sequence, False))
            elif owned.note(holder, sequence, holds=True):
                answers.append((minted_by, number, sequence, True))
        if answers:
            self._to_do.say(Send(holder, Registered(tuple(answers))))

    def on_release(self, holder: int, entries: Sequence[Entry]) -> None:
        """Handle RELEASE, as the owner."""
        if holder in self.losses:
            return
        for minted_by, number, sequence in entries:
            ref = RefId(minted_by, number)
            owned = self._owned.get(ref)
            if owned is not None and owned.note(holder, sequence, holds=False):
                self._drop_if_free(ref, owned)
        self._to_do.say(Send(holder, Released(tuple(entries))))

    def on_registered(self, entries: Iterable[tuple[int, RefNumber, int, bool]]) -> None:
        """Handle REGISTERED, as the holder."""
        for minted_by, number, sequence, known in entries:
            ref = RefId(minted_by, number)
            held = self._held.get(ref)
            if held is None or held.sequence != sequence or not held.is_unconfirmed:
                continue
            if known:
                self._confirm(ref, held)
            else:
                self._void(ref, held, held.cause or "it has dropped the value")

    def on_released(self, entries: Iterable[Entry]) -> None:
        """Handle RELEASED, as the holder."""
        for minted_by, number, sequence in entries:
            ref = RefId(minted_by, number)
            releasing = self._releasing.get(ref)
            if releasing is not None and releasing[1] == sequence:
                del self._releasing[ref]

    # Deaths and lossy networks.

    def on_peer_lost(self, peer: int, cause: str) -> None:
        """Hear that an incarnation is gone for good. Nothing of it is listened to any more."""
        if peer in self.losses:
            return
        self.losses[peer] = cause
        for key in [key for key in self.transfers if key.peer == peer]:
            self.unpin(key)
        for ref, owned in list(self._owned.items()):
            owned.discard(peer)
            self._drop_if_free(ref, owned)
        for ref, held in list(self._held.items()):
            if held.owner == peer:
                self._void(ref, held, cause)
        self._releasing = {r: o for r, o in self._releasing.items() if o[0] != peer}

    def discard(self, peers: Iterable[int]) -> None:
        """Discard these lost incarnations: no message from them, or with their references, comes.

        They are kept as long as there is a local use of a reference that one of them owned.
        """
        self._discardable.update(peers)
        if self._discardable:
            kept = {held.owner for held in self._held.values()}
            for peer in self._discardable - kept:
                self.losses.pop(peer, None)
            self._discardable &= kept

    def tick(self) -> None:
        """Repeat messages without an answer. Only needed where messages can be lost."""
        for ref, held in self._held.items():
            if held.is_unconfirmed and (held.state is HeldState.REGISTERING or held.cause):
                self._to_do.register(held.owner, (*ref, held.sequence))
        for ref, (owner, sequence) in self._releasing.items():
            self._to_do.release(owner, (*ref, sequence))
        for key, (_, only_receivers_own) in self.transfers.items():
            if not only_receivers_own:
                self._to_do.say(Send(key.peer, Pinned(key.of_reply), key.call_id))

    # Inside.

    def _hold(self, ref: RefId, owner: int, owner_name: str, state: HeldState) -> Held:
        held = self._held[ref] = Held(owner, owner_name, self._next_sequence(), state)
        # The new registration outranks an older release; its answer is not waited for any more.
        self._releasing.pop(ref, None)
        return held

    def _register(self, ref: RefId, held: Held) -> None:
        if held.owner in self.losses:
            held.state, held.cause = HeldState.VOID, self.losses[held.owner]
        else:
            self._to_do.register(held.owner, (*ref, held.sequence))

    def _let_go_if_free(self, ref: RefId, entry: Owned | Held) -> None:
        if isinstance(entry, Owned):
            self._drop_if_free(ref, entry)
        elif self._held.get(ref) is entry:
            self._release_if_free(ref, entry)

    def _drop_if_free(self, ref: RefId, owned: Owned) -> None:
        if owned.is_free and self._owned.pop(ref, None) is not None:
            self._to_do.say(Drop(ref))

    def _release_if_free(self, ref: RefId, held: Held) -> None:
        if not held.is_free:
            return
        if held.state is HeldState.VOID:
            del self._held[ref]
        elif held.state is HeldState.CONFIRMED:
            del self._held[ref]
            sequence = self._next_sequence()
            self._releasing[ref] = (held.owner, sequence)
            self._to_do.release(held.owner, (*ref, sequence))

    def _confirm(self, ref: RefId, held: Held) -> None:
        held.state, held.cause = HeldState.CONFIRMED, ""
        waiting, held.waiting = held.waiting, ()
        for arrival in waiting:
            arrival.unconfirmed -= 1
            arrival.blocking -= held.owner != arrival.key.peer
            self._advance(arrival)
        self._release_if_free(ref, held)

    def _void(self, ref: RefId, held: Held, cause: str) -> None:
        held.state, held.cause = HeldState.VOID, cause
        waiting, held.waiting = held.waiting, ()
        for arrival in waiting:
            arrival.unconfirmed -= 1
            arrival.blocking -= held.owner != arrival.key.peer
            if not arrival.handed_on:
                is_lost = cause == PARTED or held.owner in self.losses
                self._refuse(arrival, held.owner_name, cause, is_lost)
            self._advance(arrival)
        self._let_go_if_free(ref, held)

    def _advance(self, arrival: Arrival) -> None:
        if not (arrival.blocking or arrival.handed_on or arrival.failed):
            arrival.handed_on = True
            self._to_do.say(Ready(arrival.key))
        if arrival.needs_answer and not arrival.unconfirmed:
            arrival.needs_answer = False
            self._to_do.say(
                Send(arrival.key.peer, Received(arrival.key.of_reply), arrival.key.call_id)
            )
        self._discard_if_done(arrival)

    def _refuse(self, arrival: Arrival, owner_name: str, cause: str, is_owner_lost: bool) -> None:
        if arrival.failed:
            return
        arrival.failed = True
        self._to_do.say(Unavailable(arrival.key, owner_name, cause, is_owner_lost))
        self._unclaim(arrival)

    def _unclaim(self, arrival: Arrival) -> None:
        claimed, arrival.claimed = arrival.claimed, []
        for ref, owner in claimed:
            self.release(ref, owner)

    def _discard_if_done(self, arrival: Arrival) -> None:
        if arrival.claimed or arrival.unconfirmed or not (arrival.handed_on or arrival.failed):
            return
        self._arrivals.pop(arrival.key, None)
