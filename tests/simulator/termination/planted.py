"""Mistakes planted in the machine of leaving, to show that the simulator would find them."""

from __future__ import annotations

from enum import StrEnum

from farcall.protocol.termination import Messages, Silence, TerminationDetector


class _OneRoundWillDo(TerminationDetector):
    def _finish_round(self) -> Messages:
        self._previous = self._answers
        return super()._finish_round()


class _AnswersAlwaysTheSame(TerminationDetector):
    def idle(self, epoch: int) -> Messages:
        return super().idle(0)


class _AnswersBeforeReady(TerminationDetector):
    def _answer(self) -> Messages:
        was, self._ready = self._ready, True
        messages = super()._answer()
        self._ready = was
        return messages


class _AnswersWhileBusy(TerminationDetector):
    def busy(self) -> None:
        pass


class _WaitsForTheDead(TerminationDetector):
    def on_peer_lost(self, peer: int) -> Messages:
        return []


class _SuccessorDoesNotAsk(TerminationDetector):
    def on_peer_lost(self, peer: int) -> Messages:
        led = self.leader == self._me
        messages = super().on_peer_lost(peer)
        return messages if led else []


class _WaitsForTheAnswersOfTheDead(TerminationDetector):
    def on_peer_lost(self, peer: int) -> Messages:
        members = self._members
        messages = super().on_peer_lost(peer)
        if self.leader == self._me and members[0][1] == self._me:
            self._members = members  # it led before, too
            return []
        return messages


class _DiesWithItsLeader(TerminationDetector):
    def on_peer_lost(self, peer: int) -> Messages:
        self.dismissed = self.dismissed or (self._ready and peer == self.leader)
        return super().on_peer_lost(peer)


class _KeepsAnswers(TerminationDetector):
    def _start_round(self) -> Messages:
        answers = self._answers
        messages = super()._start_round()
        self._answers = dict(answers)
        return messages


class _LeaderDoesNotAskItself(TerminationDetector):
    @property
    def missing(self) -> list[int]:
        return [peer for peer in super().missing if peer != self._me or self.leader != self._me]


class _LostEndsTheRound(TerminationDetector):
    def on_peer_lost(self, peer: int) -> Messages:
        messages = super().on_peer_lost(peer)
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


class TerminationBug(StrEnum):
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


_DETECTORS: dict[TerminationBug | None, type[TerminationDetector]] = {
    TerminationBug.ONE_ROUND_WILL_DO: _OneRoundWillDo,
    TerminationBug.ANSWERS_ALWAYS_THE_SAME: _AnswersAlwaysTheSame,
    TerminationBug.ANSWERS_BEFORE_READY: _AnswersBeforeReady,
    TerminationBug.ANSWERS_WHILE_BUSY: _AnswersWhileBusy,
    TerminationBug.WAITS_FOR_THE_DEAD: _WaitsForTheDead,
    TerminationBug.SUCCESSOR_DOES_NOT_ASK: _SuccessorDoesNotAsk,
    TerminationBug.WAITS_FOR_THE_ANSWERS_OF_THE_DEAD: _WaitsForTheAnswersOfTheDead,
    TerminationBug.DIES_WITH_ITS_LEADER: _DiesWithItsLeader,
    TerminationBug.KEEPS_ANSWERS: _KeepsAnswers,
    TerminationBug.LEADER_DOES_NOT_ASK_ITSELF: _LeaderDoesNotAskItself,
    TerminationBug.LOST_ENDS_THE_ROUND: _LostEndsTheRound,
}
_SILENCES: dict[TerminationBug | None, type[Silence]] = {
    TerminationBug.NEVER_GIVES_UP: _NeverGivesUp,
    TerminationBug.GIVES_UP_AT_ONCE: _GivesUpAtOnce,
    TerminationBug.COUNTS_STANDSTILLS: _CountsStandstills,
    TerminationBug.ANSWERS_DO_NOT_COUNT: _AnswersDoNotCount,
    TerminationBug.COUNTS_QUESTIONS_ONLY: _CountsQuestionsOnly,
}


def detector_of(bug: TerminationBug | None) -> type[TerminationDetector]:
    """Return the machine with that mistake, or as it ships."""
    return _DETECTORS.get(bug, TerminationDetector)


def silence_of(bug: TerminationBug | None) -> type[Silence]:
    """Return the class of the silence counter, with the planted bug."""
    return _SILENCES.get(bug, Silence)
