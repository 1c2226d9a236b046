"""Join the calls and the references of one worker: the rules between `calls` and `refs`.

A call that carries no reference and makes none needs the tables of `calls` only. The other calls
are *noted* here: those that make a reference (`remote()`), and those whose requests pin references.

    at      event                                   effect
    ------  --------------------------------------  ----------------------------------------------
    caller  pin, before a noted request is sent     its references are kept until RECEIVED
    caller  retract: the callee hears nothing       its pins are let go; its creation is void
    caller  abandon; later `sent_late`, if unsent   CANCEL and PINNED follow the request
    caller  answered: ACCEPTED                      the reference that it makes is confirmed
    caller  answered otherwise, and it makes one    the owner is asked whether it has made it
    caller  answered with references, call open     they arrive (`Refs.arrive`)
    caller  answered with references, call closed   RECEIVED
    callee  admit: it makes a reference             the place is made, the call finished: ACCEPTED
    callee  admit: its references live here         each is used once more; the function may run
    callee  admit: its references live elsewhere    they arrive first (False), then it runs
    callee  cancelled: before it came, or it ended  answered as cancelled; its pins are let go
    callee  cancelled: it is queued or runs         its record comes out, to be stopped
    callee  answer: the caller waits                references of the answer are pinned
    both    lost                                    every open call and every served call comes out
    both    meet, of one that was lost              a new incarnation, of which nothing is known

Invariants (tests cite them):

WRK-1  Where a creation is not confirmed yet, its reference goes to its owner alone, in a request: a
       third worker's REGISTER could be there before the creation is, and be refused. Requests
       arrive in their order, so a reference that a later request carries to the owner arrives after
       the creation.
WRK-2  While a request is on its way, a pin keeps its references. If they are all its receiver's and
       it makes none, their use by the caller keeps them instead, until the call ends.
WRK-3  A creation that failed is asked for after the call was closed, and not before: the REGISTER
       goes another way than the request, and could overtake it.
WRK-4  References in an answer that no caller waits for are not kept by its sender forever.
WRK-5  Messages of a lost incarnation are ignored, and nothing is sent to it.
WRK-6  Two workers that have lost each other and meet again begin anew: all that belonged to an
       earlier meeting has ended at both when they act on the next. A third worker's message about
       either of them means its present incarnation.

Methods take events, and `take` returns the resulting instructions, in order. The methods are not
thread-safe: the owner holds one lock around all of them, except those of `Outgoing` and `Incoming`
that `calls` excepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from farcall.ids import RefId, meeting_of, original
from farcall.protocol.calls import CancelResult, Incoming, Outgoing
from farcall.protocol.instructions import (
    Answer,
    Follow,
    Instruction,
    Instructions,
    Send,
    TransferKey,
)
from farcall.protocol.refs import Refs
from farcall.wire.messages import (
    CANCELLED,
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


class NotedCall(Protocol):
    """The fields that the machine reads in the record of a call that the worker makes."""

    @property
    def created(self) -> RefId | None:
        """The reference that the call makes."""

    @property
    def is_noted(self) -> bool:
        """Return whether the call makes a reference, or pins some."""

    @property
    def cancelled(self) -> bool:
        """Return whether its end was asked for, see `wire.messages.Cancel`."""

    @property
    def sent(self) -> bool:
        """Return whether the callee may have got some of its request; else see `sent_late`."""


Call = TypeVar("Call", bound=NotedCall)
Served = TypeVar("Served")


class Calls(Generic[Call, Served]):
    """The calls between this worker and one other incarnation, both ways.

    Attributes:
        outgoing: the calls that are made from here.
        incoming: the calls that are served here.
        given_up: of calls that were abandoned and not yet answered, what they would make.
    """

    __slots__ = ("given_up", "incoming", "outgoing")

    def __init__(
        self,
        outgoing: type[Outgoing[Call]] = Outgoing,
        incoming: type[Incoming[Served]] = Incoming,
    ) -> None:
        self.outgoing = outgoing()
        self.incoming = incoming()
        self.given_up: dict[int, RefId] = {}


class WorkerMachine(Generic[Call, Served]):
    """The calls and references of one worker incarnation.

    Args:
        me: the incarnation.
        numbers: of the references that it makes up; None: 1, 2, 3 and so on.
        refs, outgoing, incoming: the machines that it is made of, for the simulator.

    Attributes:
        refs: its references.
        received_before: how many calls were received from peers that were discarded.
    """

    def __init__(
        self,
        me: int,
        numbers: Iterator[bytes] | None = None,
        *,
        refs: type[Refs] = Refs,
        outgoing: type[Outgoing[Call]] = Outgoing,
        incoming: type[Incoming[Served]] = Incoming,
    ) -> None:
        self._me = me
        self._to_do = Instructions()
        self.refs = refs(me, self._to_do, numbers)
        self._outgoing = outgoing
        self._incoming = incoming
        self._calls: dict[int, Calls[Call, Served]] = {}
        self._met_again: dict[int, int] = {}  # by the original incarnation: that of now
        self.received_before = 0

    def calls_with(self, peer: int) -> Calls[Call, Served]:
        """Return the calls between this worker and that incarnation. Needs no lock."""
        calls = self._calls.get(peer)
        if calls is None:
            calls = Calls(self._outgoing, self._incoming)
            if self.is_lost(peer):
                calls.incoming.take_all()
            calls = self._calls.setdefault(peer, calls)
        return calls

    def meet(self, peer: int) -> Calls[Call, Served]:
        """Meet an incarnation, perhaps of a worker that was lost (WRK-6); return the calls with it.

        Needs no lock.
        """
        if meeting_of(peer) > meeting_of(self._met_again.get(original(peer), 0)):
            self._met_again[original(peer)] = peer
        return self.calls_with(peer)

    def take(self) -> list[Instruction]:
        """Return the instructions since the last call, in order."""
        to_do = self._to_do.take()
        if to_do and self.refs.losses:
            return [one for one in to_do if not self._is_to_lost_peer(one)]
        return to_do

    def _is_to_lost_peer(self, instruction: Instruction) -> bool:
        return isinstance(instruction, Send | Follow | Answer) and self.is_lost(instruction.to)

    def is_lost(self, peer: int) -> bool:
        """Return whether an incarnation was lost, and nothing of it is heard any more."""
        return peer in self.refs.losses

    # References in messages.

    def localized(self, references: tuple[Reference, ...]) -> tuple[Reference, ...]:
        """Return references that arrive with the incarnations that their owners have here now.

        They keep these: what arrived in an earlier meeting is of no use in the next.
        """
        if not self._met_again:
            return references
        return tuple(
            msgspec.structs.replace(one, owner=self._met_again.get(one.owner, one.owner))
            for one in references
        )

    # The caller.

    @staticmethod
    def needs_pins(references: Iterable[Reference], callee: int, *, creates: bool) -> bool:
        """Return whether a request pins its references, see WRK-2.

        Args:
            references: what the request carries, as it travels. One that was met again owns none of
                them by that, so its own are pinned, too: that is never wrong.
            callee: to whom it goes.
            creates: whether it is one of `remote()`.
        """
        for reference in references:  # `any` would take longer, and is in the way of every method
            if reference.owner != callee:
                return True
        return creates

    def unconfirmed(self, refs: Iterable[RefId], owner: int) -> list[RefId]:
        """Return those of the references that may not be sent yet, see WRK-1.

        Args:
            refs: references that this worker holds or owns.
            owner: the receiver of a request with them; 0 for an answer.
        """
        return [ref for ref in refs if self.refs.is_being_created(ref, elsewhere_than=owner)]

    def pin(self, peer: int, call_id: int, refs: Sequence[RefId]) -> None:
        """Pin what a request carries that is about to be sent."""
        self.refs.pin(TransferKey(peer, call_id, False), refs)

    def retract(self, peer: int, call_id: int, call: Call, cause: str) -> bool:
        """Withdraw a call of which the callee has heard nothing, and never will.

        Args:
            cause: why what it would have made is void.

        Returns:
            Whether the call is to be ended: its record came out here.
        """
        calls = self.calls_with(peer)
        self.refs.unpin(TransferKey(peer, call_id, False))
        calls.given_up.pop(call_id, None)
        if call.created is not None:
            self.refs.creation_failed(call.created, cause, was_sent=False)
        return calls.outgoing.retract(call_id, call)

    def abandon(self, peer: int, call_id: int, call: Call) -> bool:
        """Give up on a call, at the caller.

        Returns:
            Whether the call is to be ended: its record came out here.
        """
        calls = self.calls_with(peer)
        if not calls.outgoing.abandon(call_id, call):
            return False
        if call.created is not None:
            calls.given_up[call_id] = call.created
        if call.sent:
            self._cancel(peer, call_id, call)
        return True

    def sent_late(self, peer: int, call_id: int, call: Call) -> None:
        """Hear that a request was sent by a thread that may not know that the call is abandoned.

        That thread has set `sent` before. So either this or `abandon` sees that both is so.
        """
        if self.calls_with(peer).outgoing.is_abandoned(call_id):
            self._cancel(peer, call_id, call)

    def ask_to_end(self, peer: int, call_id: int, call: Call) -> None:
        """Ask the callee to end a call that was sent, and go on waiting for its answer."""
        if self.calls_with(peer).outgoing.peek(call_id) is call:
            self._cancel(peer, call_id, call, waits=True)

    def _cancel(self, peer: int, call_id: int, call: Call, *, waits: bool = False) -> None:
        self._to_do.say(Follow(peer, Cancel(call.cancelled, waits), call_id))
        if call.is_noted:
            # If the request was not written after all, the callee has heard of the call now, and
            # says that it needs no pins.
            self._to_do.say(Follow(peer, Pinned(of_reply=False), call_id))

    def answered(
        self, peer: int, call_id: int, call: Call | None, answer: Accepted | Reply | Failure
    ) -> bool:
        """Hear that an answer arrived.

        If the call was open and is not noted, an answer without references changes nothing here.

        Args:
            call: what `Outgoing.outcome` gave: the record, or None if the call had ended.

        Returns:
            Whether the references of the answer are to arrive now.
        """
        if self.refs.transfers:
            self.refs.call_closed(TransferKey(peer, call_id, False))
        if call is None:
            created = self.calls_with(peer).given_up.pop(call_id, None)
        else:
            created = call.created
        if isinstance(answer, Accepted):
            if created is not None:
                self.refs.accepted(created)
            return False
        if created is not None:
            self.refs.creation_failed(created, "its creation was cancelled")
        if not answer.references:
            return False
        if call is None or created is not None:
            self.refs.asked(TransferKey(peer, call_id, True))
            return False
        return True

    # The callee.

    @staticmethod
    def created_by(peer: int, request: Request) -> RefId | None:
        """Return the reference that a request makes, if it is one of `remote()`."""
        return RefId(original(peer), request.creates) if request.creates else None

    def admit(
        self,
        peer: int,
        call_id: int,
        references: Sequence[Reference],
        created: RefId | None = None,
        sequence: int = 0,
    ) -> bool:
        """Admit a request that `Incoming` took.

        Args:
            references: those that it carries and that have to be counted.
            created: the reference that it makes, of a `remote()` call: see `created_by`.
            sequence: of that one's registration.

        Returns:
            Whether its function may run: each of the references lives here and is used once more.
            If not, they are to arrive first.
        """
        may_run = not references or self.refs.take_own(references)
        if created is not None:
            if peer != self._me:
                self.refs.accept_creation(created, peer, sequence)
            self.calls_with(peer).incoming.finish(call_id)
            self._to_do.say(Answer(peer, Accepted(), call_id))
        return may_run

    def cancelled(self, peer: int, call_id: int, *, waits: bool) -> Served | None:
        """CANCEL arrived. The record of the call if it is queued or runs, to be stopped.

        Args:
            waits: whether the caller takes the answer nevertheless.
        """
        found, call = self.calls_with(peer).incoming.cancel(call_id)
        if found is CancelResult.FINISHED and waits:
            return None  # the caller takes the answer of the function: no other may be first
        if found is not CancelResult.RUNNING:
            # If it has ended with references: its caller, interrupted, may have dropped the answer.
            if not waits:
                self.refs.unpin(TransferKey(peer, call_id, True))
            answer = Failure(CANCELLED, "the call was cancelled", "")
            self._to_do.say(Answer(peer, answer, call_id))
        return call

    def answer(self, peer: int, call_id: int, refs: Sequence[RefId]) -> bool:
        """Hear that a function has ended, and that its answer carries these references.

        Returns:
            Whether to send it: False if the caller is gone, or the call was answered.
        """
        if not self.calls_with(peer).incoming.finish(call_id):
            return False
        if refs:
            self.refs.pin(TransferKey(peer, call_id, True), refs)
        return True

    # Both.

    def on_message(self, peer: int, message: Message, call_id: int) -> None:
        """Handle a message of the reference protocol."""
        if isinstance(message, Release):
            self.refs.on_release(peer, message.entries)
        elif isinstance(message, Released):
            self.refs.on_released(message.entries)
        elif isinstance(message, Received):
            self.refs.unpin(TransferKey(peer, call_id, message.of_reply))
        elif isinstance(message, Register):
            self.refs.on_register(peer, message.entries)
        elif isinstance(message, Registered):
            self.refs.on_registered(message.entries)
        elif isinstance(message, Pinned):
            calls = self.calls_with(peer)
            if message.of_reply:
                has_come = calls.outgoing.is_closed(call_id)
            else:
                has_come = calls.incoming.has_seen(call_id)
            if has_come:
                self.refs.asked(TransferKey(peer, call_id, message.of_reply))
        else:
            raise AssertionError(message)

    def on_peer_lost(self, peer: int, cause: str) -> tuple[list[Call], list[Served]]:
        """Hear that an incarnation is gone for good.

        Returns:
            The open calls to it, to be failed, and its calls that run here, to be stopped.
        """
        self.refs.on_peer_lost(peer, cause)
        calls = self._calls.get(peer)
        if calls is None:
            return [], []
        calls.given_up.clear()
        return calls.outgoing.take_all(), calls.incoming.take_all()

    def discard(self, peers: Iterable[int]) -> None:
        """Drop all records of lost incarnations, see `Refs.discard`."""
        for peer in peers:
            calls = self._calls.pop(peer, None)
            if calls is not None:
                self.received_before += calls.incoming.received
            if self._met_again.get(original(peer)) == peer:
                del self._met_again[original(peer)]
        self.refs.discard(peers)

    def tick(self) -> None:
        """Repeat messages without an answer. Only needed where messages can be lost."""
        for peer, calls in self._calls.items():
            for call_id in calls.outgoing.abandoned():
                self._to_do.say(Follow(peer, Cancel(), call_id))
        self.refs.tick()

    def peers(self) -> Iterable[tuple[int, Calls[Call, Served]]]:
        """Return every peer with which there were calls, and the calls."""
        return self._calls.items()
