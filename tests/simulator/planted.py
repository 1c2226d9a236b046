"""Mistakes planted in the machines, to show that the simulator would find them.

Each is a subclass that does one thing wrong; nothing in `farcall.protocol` knows of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from farcall.ids import RefId
from farcall.protocol.calls import CancelResult, Incoming
from farcall.protocol.instructions import Answer, Send, TransferKey
from farcall.protocol.ref_entries import Held, HeldState, Owned
from farcall.protocol.refs import Refs
from farcall.protocol.worker import WorkerMachine
from farcall.wire.messages import (
    CANCELLED,
    Accepted,
    Entry,
    Failure,
    Message,
    Pinned,
    Received,
    Reference,
)
from simulator.sim_records import Call, Handle, Machines
from simulator.sim_worker import SimWorker


class _IgnoresSequences(Refs):
    def on_register(self, holder: int, entries: Iterable[Entry]) -> None:
        entries = tuple(entries)
        self._drop_sequences(holder, entries)
        super().on_register(holder, entries)

    def on_release(self, holder: int, entries: Sequence[Entry]) -> None:
        self._drop_sequences(holder, entries)
        super().on_release(holder, entries)

    def _drop_sequences(self, holder: int, entries: Iterable[Entry]) -> None:
        for minted_by, number, _ in entries:
            owned = self._owned.get(RefId(minted_by, number))
            if owned is not None and holder in owned.holders:
                owned.holders[holder] = 1 if owned.holders[holder] > 0 else -1


class _DoesNotWaitForOwner(Refs):
    def arrive(self, key: TransferKey, references: Sequence[Reference]) -> None:
        super().arrive(key, references)
        arrival = self._arrivals.get(key)
        if arrival is not None and arrival.blocking:
            arrival.blocking = 0
            self._advance(arrival)


class _DoesNotPin(Refs):
    def pin(self, key: TransferKey, refs: Sequence[RefId]) -> None:
        self.transfers[key] = ((), False)


class _UnpinsOnOutcome(Refs):
    def call_closed(self, key: TransferKey) -> None:
        self.unpin(key)


class _ReleasesUnconfirmed(Refs):
    def _release_if_free(self, ref: RefId, held: Held) -> None:
        if held.state is not HeldState.VOID and not (held.local or held.pins):
            held.state = HeldState.CONFIRMED
            held.waiting = ()
        super()._release_if_free(ref, held)


class _SaysReceivedAtOnce(Refs):
    def arrive(self, key: TransferKey, references: Sequence[Reference]) -> None:
        super().arrive(key, references)
        self._to_do.say(Send(key.peer, Received(key.of_reply), key.call_id))


class _KeepsDeadHolders(Refs):
    def on_peer_lost(self, peer: int, cause: str) -> None:
        kept = {
            ref: owned.holders[peer] for ref, owned in self._owned.items() if peer in owned.holders
        }
        for ref in kept:
            self._owned[ref].local += 1
        super().on_peer_lost(peer, cause)
        for ref, sequence in kept.items():
            self._owned[ref].note(peer, abs(sequence), sequence > 0)
            self.release(ref, self._me)


class _ReleaseIgnoresPins(Refs):
    def on_release(self, holder: int, entries: Sequence[Entry]) -> None:
        for minted_by, number, _ in entries:
            owned = self._owned.get(RefId(minted_by, number))
            if owned is not None:
                owned.pins = 0
        super().on_release(holder, entries)


class _NeverRepeatsReleases(Refs):
    def tick(self) -> None:
        super().tick()
        self._to_do.releases.clear()


class _BelievesInFailedCreation(Refs):
    def creation_failed(self, ref: RefId, cause: str, was_sent: bool = True) -> None:
        held = self._held.get(ref)
        if held is not None and held.state is HeldState.CREATING:
            self._void(ref, held, cause)


class _CountsUsesOfBefore(Refs):
    def _hold(self, ref: RefId, owner: int, owner_name: str, state: HeldState) -> Held:
        before = self._held.get(ref)
        held = super()._hold(ref, owner, owner_name, state)
        if before is not None:
            held.local = before.local
        return held

    def _entry(self, ref: RefId, owner: int) -> Owned | Held | None:
        return self._owned.get(ref) or self._held.get(ref)


class _AnswersEveryPinned(Refs):
    def asked(self, key: TransferKey) -> None:
        self._to_do.say(Send(key.peer, Received(key.of_reply), key.call_id))


class _TakesOwnOnce(Refs):
    def take_own(self, references: Sequence[Reference]) -> bool:
        if not super().take_own(references):
            return False
        for ref, uses in Counter(RefId(r.minted_by, r.number) for r in references).items():
            self._owned[ref].local -= uses - 1
        return True


class _CountsBeforeItLooks(Refs):
    def take_own(self, references: Sequence[Reference]) -> bool:
        take_own = super().take_own
        return all(take_own((reference,)) for reference in references)


class _RunsDuplicates(Incoming[Any]):
    def request(self, call_id: int, record: Any) -> bool:
        super().request(call_id, record)
        self._running[call_id] = record
        return True


class _ForgetsCancelled(Incoming[Any]):
    def cancel(self, call_id: int) -> tuple[CancelResult, Any]:
        record = self._running.get(call_id)
        if record is not None:
            return CancelResult.RUNNING, record
        return CancelResult.FINISHED if self.has_seen(call_id) else CancelResult.UNSEEN, None


class _RunsForTheDead(Incoming[Any]):
    def take_all(self) -> list[Any]:
        seen_to = self._seen_to
        running = super().take_all()
        self._seen_to = seen_to
        return running


class _ListensToTheDead(Refs):
    def on_register(self, holder: int, entries: Iterable[Entry]) -> None:
        losses, self.losses = self.losses, {}
        super().on_register(holder, entries)
        self.losses = losses


class _ForwardsUnaccepted(WorkerMachine[Any, Any]):
    def unconfirmed(self, refs: Iterable[RefId], owner: int) -> list[RefId]:
        return []


class _RepliesUnaccepted(WorkerMachine[Any, Any]):
    def unconfirmed(self, refs: Iterable[RefId], owner: int) -> list[RefId]:
        return super().unconfirmed(refs, owner) if owner else []


class _PinsForNobody(WorkerMachine[Any, Any]):
    @staticmethod
    def needs_pins(references: Iterable[Reference], callee: int, *, creates: bool) -> bool:
        return creates


class _PinsForNoRemote(WorkerMachine[Any, Any]):
    @staticmethod
    def needs_pins(references: Iterable[Reference], callee: int, *, creates: bool) -> bool:
        return WorkerMachine.needs_pins(references, callee, creates=False)


class _KeepsPinsOfUnsent(WorkerMachine[Any, Any]):
    def retract(self, peer: int, call_id: int, call: Any, cause: str) -> bool:
        self.refs.unpin, unpin = lambda key: None, self.refs.unpin  # type: ignore[method-assign]
        try:
            return super().retract(peer, call_id, call, cause)
        finally:
            self.refs.unpin = unpin  # type: ignore[method-assign]


class _WaitsForUnsentCreation(WorkerMachine[Any, Any]):
    def retract(self, peer: int, call_id: int, call: Any, cause: str) -> bool:
        call.created = None
        return super().retract(peer, call_id, call, cause)


class _ForgetsGivenUpCreation(WorkerMachine[Any, Any]):
    def abandon(self, peer: int, call_id: int, call: Any) -> bool:
        is_open = super().abandon(peer, call_id, call)
        self.calls_with(peer).given_up.clear()
        return is_open


class _AsksBeforeTheAnswer(WorkerMachine[Any, Any]):
    def abandon(self, peer: int, call_id: int, call: Any) -> bool:
        is_open = super().abandon(peer, call_id, call)
        if is_open and call.created is not None:
            self.refs.creation_failed(call.created, "it was given up")
        return is_open


class _NeverCancelsLateSent(WorkerMachine[Any, Any]):
    def sent_late(self, peer: int, call_id: int, call: Any) -> None:
        pass

    def tick(self) -> None:
        self.refs.tick()


class _UnpinsWhatIsAwaited(WorkerMachine[Any, Any]):
    def cancelled(self, peer: int, call_id: int, *, waits: bool) -> Any:
        return super().cancelled(peer, call_id, waits=False)


class _AnswersWhatIsAwaited(WorkerMachine[Any, Any]):
    def cancelled(self, peer: int, call_id: int, *, waits: bool) -> Any:
        call = super().cancelled(peer, call_id, waits=waits)
        if call is None and waits:
            self._to_do.say(Answer(peer, Failure(CANCELLED, "", ""), call_id))
        return call


class _LeavesCreationsOpen(WorkerMachine[Any, Any]):
    def admit(
        self,
        peer: int,
        call_id: int,
        references: Sequence[Reference],
        created: RefId | None = None,
        sequence: int = 0,
    ) -> bool:
        incoming = self.calls_with(peer).incoming
        task = incoming.cancel(call_id)[1]
        may_run = super().admit(peer, call_id, references, created, sequence)
        incoming._running[call_id] = task
        return may_run


class _ForgetsNobody(WorkerMachine[Any, Any]):
    def discard(self, peers: Iterable[int]) -> None:
        self._calls = {p: calls for p, calls in self._calls.items() if p not in peers}


class _NeverPinsAnswers(WorkerMachine[Any, Any]):
    def answer(self, peer: int, call_id: int, refs: Sequence[RefId]) -> bool:
        return super().answer(peer, call_id, ())


class _TakesAnswersOfTheGivenUp(WorkerMachine[Any, Any]):
    def answered(self, peer: int, call_id: int, call: Any, answer: Any) -> bool:
        super().answered(peer, call_id, call, answer)
        return not isinstance(answer, Accepted) and bool(answer.references)


class _SaysReceivedForTheUnseen(WorkerMachine[Any, Any]):
    def on_message(self, peer: int, message: Message, call_id: int) -> None:
        if isinstance(message, Pinned):
            self.refs.asked(TransferKey(peer, call_id, message.of_reply))
        else:
            super().on_message(peer, message, call_id)


class _TakesThoseMetAgainForLost(WorkerMachine[Any, Any]):
    def localized(self, references: tuple[Reference, ...]) -> tuple[Reference, ...]:
        return references


class _LetsGoWhenSent(SimWorker):
    def _keep(self, call: Call, arguments: Sequence[Handle]) -> None:
        pass


class _KeepsForAbandoned(SimWorker):
    def abandon(self, peer: int, call_id: int) -> None:
        call = self.machine.calls_with(peer).outgoing.peek(call_id)
        if call is not None:
            call.kept = ()
        super().abandon(peer, call_id)


class _UnpinsAbandoned(WorkerMachine[Any, Any]):
    def abandon(self, peer: int, call_id: int, call: Any) -> bool:
        is_open = super().abandon(peer, call_id, call)
        self.refs.unpin(TransferKey(peer, call_id, False))
        return is_open


class _ForgetsOwnOfCancelled(SimWorker):
    def rebuild(self, key: TransferKey) -> None:
        task, references = self.received[key]
        if task is not None and task.has_uses and not self._is_wanted(task):
            for reference in references:
                self.refs.acquire(RefId(reference.minted_by, reference.number), reference.owner)
        super().rebuild(key)


class PlantedBug(StrEnum):
    """The mistakes to plant."""

    OWNER_IGNORES_SEQUENCES = "owner-ignores-sequences"
    DOES_NOT_WAIT_FOR_OWNER = "does-not-wait-for-owner"
    DOES_NOT_PIN = "does-not-pin"
    UNPINS_ON_OUTCOME = "unpins-on-outcome"
    RELEASES_UNCONFIRMED = "releases-unconfirmed"
    RUNS_DUPLICATES = "runs-duplicates"
    SAYS_RECEIVED_AT_ONCE = "says-received-at-once"
    ANSWERS_EVERY_PINNED = "answers-every-pinned"
    KEEPS_DEAD_HOLDERS = "keeps-dead-holders"
    RELEASE_IGNORES_PINS = "release-ignores-pins"
    NEVER_REPEATS_RELEASES = "never-repeats-releases"
    BELIEVES_IN_FAILED_CREATION = "believes-in-failed-creation"
    FORGETS_CANCELLED = "forgets-cancelled"
    LISTENS_TO_THE_DEAD = "listens-to-the-dead"
    RUNS_FOR_THE_DEAD = "runs-for-the-dead"
    FORWARDS_UNACCEPTED = "forwards-unaccepted"
    REPLIES_UNACCEPTED = "replies-unaccepted"
    TAKES_OWN_ONCE = "takes-own-once"
    COUNTS_BEFORE_IT_LOOKS = "counts-before-it-looks"
    LETS_GO_WHEN_SENT = "lets-go-when-sent"
    KEEPS_FOR_ABANDONED = "keeps-for-abandoned"
    UNPINS_ABANDONED = "unpins-abandoned"
    UNPINS_WHAT_IS_AWAITED = "unpins-what-is-awaited"  # farcall's own once
    ANSWERS_WHAT_IS_AWAITED = "answers-what-is-awaited"  # likewise
    FORGETS_OWN_OF_CANCELLED = "forgets-own-of-cancelled"
    PINS_FOR_NOBODY = "pins-for-nobody"
    PINS_FOR_NO_REMOTE = "pins-for-no-remote"
    KEEPS_PINS_OF_UNSENT = "keeps-pins-of-unsent"
    WAITS_FOR_UNSENT_CREATION = "waits-for-unsent-creation"
    FORGETS_GIVEN_UP_CREATION = "forgets-given-up-creation"
    ASKS_BEFORE_THE_ANSWER = "asks-before-the-answer"
    NEVER_CANCELS_LATE_SENT = "never-cancels-late-sent"
    LEAVES_CREATIONS_OPEN = "leaves-creations-open"
    FORGETS_NOBODY = "forgets-nobody"
    NEVER_PINS_ANSWERS = "never-pins-answers"
    TAKES_ANSWERS_OF_THE_GIVEN_UP = "takes-answers-of-the-given-up"
    SAYS_RECEIVED_FOR_THE_UNSEEN = "says-received-for-the-unseen"
    TAKES_THOSE_MET_AGAIN_FOR_LOST = "takes-those-met-again-for-lost"
    COUNTS_USES_OF_BEFORE = "counts-uses-of-before"


_PLANTS: dict[PlantedBug, Machines] = {
    PlantedBug.OWNER_IGNORES_SEQUENCES: Machines(refs=_IgnoresSequences),
    PlantedBug.DOES_NOT_WAIT_FOR_OWNER: Machines(refs=_DoesNotWaitForOwner),
    PlantedBug.DOES_NOT_PIN: Machines(refs=_DoesNotPin),
    PlantedBug.UNPINS_ON_OUTCOME: Machines(refs=_UnpinsOnOutcome),
    PlantedBug.RELEASES_UNCONFIRMED: Machines(refs=_ReleasesUnconfirmed),
    PlantedBug.RUNS_DUPLICATES: Machines(incoming=_RunsDuplicates),
    PlantedBug.SAYS_RECEIVED_AT_ONCE: Machines(refs=_SaysReceivedAtOnce),
    PlantedBug.ANSWERS_EVERY_PINNED: Machines(refs=_AnswersEveryPinned),
    PlantedBug.KEEPS_DEAD_HOLDERS: Machines(refs=_KeepsDeadHolders),
    PlantedBug.RELEASE_IGNORES_PINS: Machines(refs=_ReleaseIgnoresPins),
    PlantedBug.NEVER_REPEATS_RELEASES: Machines(refs=_NeverRepeatsReleases),
    PlantedBug.BELIEVES_IN_FAILED_CREATION: Machines(refs=_BelievesInFailedCreation),
    PlantedBug.FORGETS_CANCELLED: Machines(incoming=_ForgetsCancelled),
    PlantedBug.LISTENS_TO_THE_DEAD: Machines(refs=_ListensToTheDead),
    PlantedBug.RUNS_FOR_THE_DEAD: Machines(incoming=_RunsForTheDead),
    PlantedBug.FORWARDS_UNACCEPTED: Machines(worker=_ForwardsUnaccepted),
    PlantedBug.REPLIES_UNACCEPTED: Machines(worker=_RepliesUnaccepted),
    PlantedBug.TAKES_OWN_ONCE: Machines(refs=_TakesOwnOnce),
    PlantedBug.COUNTS_BEFORE_IT_LOOKS: Machines(refs=_CountsBeforeItLooks),
    PlantedBug.UNPINS_ABANDONED: Machines(worker=_UnpinsAbandoned),
    PlantedBug.UNPINS_WHAT_IS_AWAITED: Machines(worker=_UnpinsWhatIsAwaited),
    PlantedBug.ANSWERS_WHAT_IS_AWAITED: Machines(worker=_AnswersWhatIsAwaited),
    PlantedBug.PINS_FOR_NOBODY: Machines(worker=_PinsForNobody),
    PlantedBug.PINS_FOR_NO_REMOTE: Machines(worker=_PinsForNoRemote),
    PlantedBug.KEEPS_PINS_OF_UNSENT: Machines(worker=_KeepsPinsOfUnsent),
    PlantedBug.WAITS_FOR_UNSENT_CREATION: Machines(worker=_WaitsForUnsentCreation),
    PlantedBug.FORGETS_GIVEN_UP_CREATION: Machines(worker=_ForgetsGivenUpCreation),
    PlantedBug.ASKS_BEFORE_THE_ANSWER: Machines(worker=_AsksBeforeTheAnswer),
    PlantedBug.NEVER_CANCELS_LATE_SENT: Machines(worker=_NeverCancelsLateSent),
    PlantedBug.LEAVES_CREATIONS_OPEN: Machines(worker=_LeavesCreationsOpen),
    PlantedBug.FORGETS_NOBODY: Machines(worker=_ForgetsNobody),
    PlantedBug.NEVER_PINS_ANSWERS: Machines(worker=_NeverPinsAnswers),
    PlantedBug.TAKES_ANSWERS_OF_THE_GIVEN_UP: Machines(worker=_TakesAnswersOfTheGivenUp),
    PlantedBug.SAYS_RECEIVED_FOR_THE_UNSEEN: Machines(worker=_SaysReceivedForTheUnseen),
    PlantedBug.TAKES_THOSE_MET_AGAIN_FOR_LOST: Machines(worker=_TakesThoseMetAgainForLost),
    PlantedBug.COUNTS_USES_OF_BEFORE: Machines(refs=_CountsUsesOfBefore),
}

_WORKERS: dict[PlantedBug, type[SimWorker]] = {
    PlantedBug.LETS_GO_WHEN_SENT: _LetsGoWhenSent,
    PlantedBug.KEEPS_FOR_ABANDONED: _KeepsForAbandoned,
    PlantedBug.FORGETS_OWN_OF_CANCELLED: _ForgetsOwnOfCancelled,
}


def plant(bug: PlantedBug | None) -> tuple[Machines, type[SimWorker]]:
    """Return the parts of simulated workers: the machines as they are, or with one mistake."""
    if bug is None:
        return Machines(), SimWorker
    return _PLANTS.get(bug, Machines()), _WORKERS.get(bug, SimWorker)
