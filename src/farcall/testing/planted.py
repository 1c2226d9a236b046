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
from farcall.protocol.ref_entries import Held, HeldState, Send, TransferKey
from farcall.protocol.refs import Refs
from farcall.testing.sim_records import Call, Machines
from farcall.testing.sim_worker import SimWorker
from farcall.wire.messages import Message, Received, Reference


class _IgnoresSequences(Refs):
    def on_register(self, holder: int, entries: Iterable[tuple[int, int, int]]) -> None:
        entries = tuple(entries)
        self._forget_sequences(holder, entries)
        super().on_register(holder, entries)

    def on_release(self, holder: int, entries: Sequence[tuple[int, int, int]]) -> None:
        self._forget_sequences(holder, entries)
        super().on_release(holder, entries)

    def _forget_sequences(self, holder: int, entries: Iterable[tuple[int, int, int]]) -> None:
        for minted_by, number, _ in entries:
            owned = self._owned.get(RefId(minted_by, number))
            if owned is not None and holder in owned.holders:
                owned.holders[holder] = (0, owned.holders[holder][1])


class _DoesNotWaitForOwner(Refs):
    def arrive(self, key: TransferKey, references: Sequence[Reference]) -> None:
        super().arrive(key, references)
        arrival = self._arrivals.get(key)
        if arrival is not None and arrival.blocking:
            arrival.blocking = 0
            self._advance(arrival)


class _DoesNotPin(Refs):
    def pin(self, key: TransferKey, refs: Sequence[RefId]) -> None:
        self._transfers[key] = ((), False)


class _UnpinsOnOutcome(Refs):
    def call_closed(self, key: TransferKey) -> None:
        self.unpin(key)


class _ReleasesUnconfirmed(Refs):
    def _release_if_free(self, ref: RefId, held: Held) -> None:
        if held.state is not HeldState.VOID and not (held.local or held.pins):
            held.state = HeldState.CONFIRMED
            held.waiting.clear()
        super()._release_if_free(ref, held)


class _SaysReceivedAtOnce(Refs):
    def arrive(self, key: TransferKey, references: Sequence[Reference]) -> None:
        super().arrive(key, references)
        self._outbox.say(Send(key.peer, Received(key.of_reply), key.call_id))


class _KeepsDeadHolders(Refs):
    def lost(self, peer: int, cause: str) -> None:
        kept = {
            ref: owned.holders[peer] for ref, owned in self._owned.items() if peer in owned.holders
        }
        for ref in kept:
            self._owned[ref].local += 1
        super().lost(peer, cause)
        for ref, (sequence, holds) in kept.items():
            self._owned[ref].note(peer, sequence, holds)
            self.release(ref)


class _ReleaseIgnoresPins(Refs):
    def on_release(self, holder: int, entries: Sequence[tuple[int, int, int]]) -> None:
        for minted_by, number, _ in entries:
            owned = self._owned.get(RefId(minted_by, number))
            if owned is not None:
                owned.pins = 0
        super().on_release(holder, entries)


class _NeverRepeatsReleases(Refs):
    def tick(self) -> None:
        super().tick()
        self._outbox.releases.clear()


class _BelievesInFailedCreation(Refs):
    def creation_failed(self, ref: RefId, cause: str, was_sent: bool = True) -> None:
        held = self._held.get(ref)
        if held is not None and held.state is HeldState.CREATING:
            self._void(ref, held, cause)


class _AnswersEveryPinned(Refs):
    def asked(self, key: TransferKey) -> None:
        self._outbox.say(Send(key.peer, Received(key.of_reply), key.call_id))


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
        if record is None:
            return CancelResult.ANSWER, None
        return CancelResult.RUNNING, record


class _ListensToTheDead(SimWorker):
    def receive(self, peer: int, message: Message, call_id: int) -> None:
        lost, self.lost = self.lost, set()
        super().receive(peer, message, call_id)
        self.lost |= lost


class _ForwardsUnaccepted(SimWorker):
    def may_send(self, ref: RefId, peer: int, of_reply: bool) -> bool:
        return self.refs.void_cause(ref) is None


class _RepliesUnaccepted(SimWorker):
    def may_send(self, ref: RefId, peer: int, of_reply: bool) -> bool:
        return super().may_send(ref, peer, of_reply=False)


class _LetsGoWhenSent(SimWorker):
    def _keep(self, call: Call, arguments: Sequence[RefId]) -> None:
        pass


class _KeepsForAbandoned(SimWorker):
    def abandon(self, peer: int, call_id: int) -> None:
        call = self.outgoing[peer].peek(call_id)
        if call is not None:
            call.kept = ()
        super().abandon(peer, call_id)


class _UnpinsAbandoned(SimWorker):
    def abandon(self, peer: int, call_id: int) -> None:
        super().abandon(peer, call_id)
        self.refs.unpin(TransferKey(peer, call_id, False))
        self.pump()


class _ForgetsOwnOfCancelled(SimWorker):
    def rebuild(self, key: TransferKey) -> None:
        task, references = self.received[key]
        if task is not None and task.has_uses and not self._is_wanted(task):
            for reference in references:
                self.refs.acquire(RefId(reference.minted_by, reference.number))
        super().rebuild(key)


class PlantedBug(StrEnum):
    """What to do wrong."""

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
    FORWARDS_UNACCEPTED = "forwards-unaccepted"
    REPLIES_UNACCEPTED = "replies-unaccepted"
    TAKES_OWN_ONCE = "takes-own-once"
    COUNTS_BEFORE_IT_LOOKS = "counts-before-it-looks"
    LETS_GO_WHEN_SENT = "lets-go-when-sent"
    KEEPS_FOR_ABANDONED = "keeps-for-abandoned"
    UNPINS_ABANDONED = "unpins-abandoned"
    FORGETS_OWN_OF_CANCELLED = "forgets-own-of-cancelled"


_PLANTS: dict[PlantedBug, tuple[Machines, type[SimWorker]]] = {
    PlantedBug.OWNER_IGNORES_SEQUENCES: (Machines(refs=_IgnoresSequences), SimWorker),
    PlantedBug.DOES_NOT_WAIT_FOR_OWNER: (Machines(refs=_DoesNotWaitForOwner), SimWorker),
    PlantedBug.DOES_NOT_PIN: (Machines(refs=_DoesNotPin), SimWorker),
    PlantedBug.UNPINS_ON_OUTCOME: (Machines(refs=_UnpinsOnOutcome), SimWorker),
    PlantedBug.RELEASES_UNCONFIRMED: (Machines(refs=_ReleasesUnconfirmed), SimWorker),
    PlantedBug.RUNS_DUPLICATES: (Machines(incoming=_RunsDuplicates), SimWorker),
    PlantedBug.SAYS_RECEIVED_AT_ONCE: (Machines(refs=_SaysReceivedAtOnce), SimWorker),
    PlantedBug.ANSWERS_EVERY_PINNED: (Machines(refs=_AnswersEveryPinned), SimWorker),
    PlantedBug.KEEPS_DEAD_HOLDERS: (Machines(refs=_KeepsDeadHolders), SimWorker),
    PlantedBug.RELEASE_IGNORES_PINS: (Machines(refs=_ReleaseIgnoresPins), SimWorker),
    PlantedBug.NEVER_REPEATS_RELEASES: (Machines(refs=_NeverRepeatsReleases), SimWorker),
    PlantedBug.BELIEVES_IN_FAILED_CREATION: (Machines(refs=_BelievesInFailedCreation), SimWorker),
    PlantedBug.FORGETS_CANCELLED: (Machines(incoming=_ForgetsCancelled), SimWorker),
    PlantedBug.LISTENS_TO_THE_DEAD: (Machines(), _ListensToTheDead),
    PlantedBug.FORWARDS_UNACCEPTED: (Machines(), _ForwardsUnaccepted),
    PlantedBug.REPLIES_UNACCEPTED: (Machines(), _RepliesUnaccepted),
    PlantedBug.TAKES_OWN_ONCE: (Machines(refs=_TakesOwnOnce), SimWorker),
    PlantedBug.COUNTS_BEFORE_IT_LOOKS: (Machines(refs=_CountsBeforeItLooks), SimWorker),
    PlantedBug.LETS_GO_WHEN_SENT: (Machines(), _LetsGoWhenSent),
    PlantedBug.KEEPS_FOR_ABANDONED: (Machines(), _KeepsForAbandoned),
    PlantedBug.UNPINS_ABANDONED: (Machines(), _UnpinsAbandoned),
    PlantedBug.FORGETS_OWN_OF_CANCELLED: (Machines(), _ForgetsOwnOfCancelled),
}


def plant(bug: PlantedBug | None) -> tuple[Machines, type[SimWorker]]:
    """What simulated workers are made of: the machines as they are, or with one mistake."""
    return (Machines(), SimWorker) if bug is None else _PLANTS[bug]
