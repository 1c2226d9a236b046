"""Mistakes planted in the machine of leaving, to show that the simulator would find them."""

from __future__ import annotations

from enum import StrEnum

from farcall.protocol.departure import Departure, Messages, Silence


class _OneRoundWillDo(Departure):
    def _finish_round(self) -> Messages:
        self._previous = self._answers
        return super()._finish_round()


class _AnswersAlwaysTheSame(Departure):
    def idle(self, epoch: int) -> Messages:
        return super().idle(0)


class _AnswersBeforeReady(Departure):
    def _answer(self) -> Messages:
        was, self._ready = self._ready, True
        messages = super()._answer()
        self._ready = was
        return messages


class _AnswersWhileBusy(Departure):
    def busy(self) -> None:
        pass


class _WaitsForTheDead(Departure):
    def lost(self, peer: int) -> Messages:
        return []


class _SuccessorDoesNotAsk(Departure):
    def lost(self, peer: int) -> Messages:
        led = self.leader == self._me
        messages = super().lost(peer)
        return messages if led else []


class _WaitsForTheAnswersOfTheDead(Departure):
    def lost(self, peer: int) -> Messages:
        members = self._members
        messages = super().lost(peer)
        if self.leader == self._me and members[0][1] == self._me:
            self._members = members  # it led before, too
            return []
        return messages


class _DiesWithItsLeader(Departure):
    def lost(self, peer: int) -> Messages:
        self.dismissed = self.dismissed or (self._ready and peer == self.leader)
        return super().lost(peer)


class _KeepsAnswers(Departure):
    def _start_round(self) -> Messages:
        answers = self._answers
        messages = super()._start_round()
        self._answers = dict(answers)
        return messages


class _LeaderDoesNotAskItself(Departure):
    @property
    def missing(self) -> list[int]:
        return [peer for peer in super().missing if peer != self._me or self.leader != self._me]


class _LostEndsTheRound(Departure):
    def lost(self, peer: int) -> Messages:
        messages = super().lost(peer)
        self._previous = self._answers
        return messages


class _NeverGivesUp(Silence):
    def unanswered(self, peer: int, seconds: float) -> bool:
        super().unanswered(peer, seconds)
        return False


class _GivesUpAtOnce(Silence):
    def unanswered(self, peer: int, seconds: float) -> bool:
        super().unanswered(peer, seconds)
        return True


class _CountsStandstills(Silence):
    def unanswered(self, peer: int, seconds: float) -> bool:
        self._silent[peer] = self._silent.get(peer, 0.0) + max(0.0, seconds - self.question)
        return super().unanswered(peer, min(seconds, self.question))


class _AnswersDoNotCount(Silence):
    def answered(self, peer: int) -> None:
        pass


class _CountsQuestionsOnly(Silence):
    def unanswered(self, peer: int, seconds: float) -> bool:
        return super().unanswered(peer, self.question)


class DepartureBug(StrEnum):
    """Each is found by the simulator."""

    ONE_ROUND_WILL_DO = "one-round-will-do"
    ANSWERS_ALWAYS_THE_SAME = "answers-always-the-same"
    ANSWERS_BEFORE_READY = "answers-before-ready"
    ANSWERS_WHILE_BUSY = "answers-while-busy"
    WAITS_FOR_THE_DEAD = "waits-for-the-dead"
    SUCCESSOR_DOES_NOT_ASK = "successor-does-not-ask"
    WAITS_FOR_THE_ANSWERS_OF_THE_DEAD = "waits-for-the-answers-of-the-dead"
    DIES_WITH_ITS_LEADER = "dies-with-its-leader"
    KEEPS_ANSWERS = "keeps-answers"
    LEADER_DOES_NOT_ASK_ITSELF = "leader-does-not-ask-itself"
    LOST_ENDS_THE_ROUND = "lost-ends-the-round"
    NEVER_GIVES_UP = "never-gives-up"
    GIVES_UP_AT_ONCE = "gives-up-at-once"
    COUNTS_STANDSTILLS = "counts-standstills"
    ANSWERS_DO_NOT_COUNT = "answers-do-not-count"
    COUNTS_QUESTIONS_ONLY = "counts-questions-only"


_DEPARTURES: dict[DepartureBug | None, type[Departure]] = {
    DepartureBug.ONE_ROUND_WILL_DO: _OneRoundWillDo,
    DepartureBug.ANSWERS_ALWAYS_THE_SAME: _AnswersAlwaysTheSame,
    DepartureBug.ANSWERS_BEFORE_READY: _AnswersBeforeReady,
    DepartureBug.ANSWERS_WHILE_BUSY: _AnswersWhileBusy,
    DepartureBug.WAITS_FOR_THE_DEAD: _WaitsForTheDead,
    DepartureBug.SUCCESSOR_DOES_NOT_ASK: _SuccessorDoesNotAsk,
    DepartureBug.WAITS_FOR_THE_ANSWERS_OF_THE_DEAD: _WaitsForTheAnswersOfTheDead,
    DepartureBug.DIES_WITH_ITS_LEADER: _DiesWithItsLeader,
    DepartureBug.KEEPS_ANSWERS: _KeepsAnswers,
    DepartureBug.LEADER_DOES_NOT_ASK_ITSELF: _LeaderDoesNotAskItself,
    DepartureBug.LOST_ENDS_THE_ROUND: _LostEndsTheRound,
}
_SILENCES: dict[DepartureBug | None, type[Silence]] = {
    DepartureBug.NEVER_GIVES_UP: _NeverGivesUp,
    DepartureBug.GIVES_UP_AT_ONCE: _GivesUpAtOnce,
    DepartureBug.COUNTS_STANDSTILLS: _CountsStandstills,
    DepartureBug.ANSWERS_DO_NOT_COUNT: _AnswersDoNotCount,
    DepartureBug.COUNTS_QUESTIONS_ONLY: _CountsQuestionsOnly,
}


def departure_of(bug: DepartureBug | None) -> type[Departure]:
    """The machine with that mistake, or as it ships."""
    return _DEPARTURES.get(bug, Departure)


def silence_of(bug: DepartureBug | None) -> type[Silence]:
    """The same for who counts silence."""
    return _SILENCES.get(bug, Silence)
