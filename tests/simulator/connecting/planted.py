"""Mistakes planted in the machine of connecting, to show that the simulator would find them.

Those marked with a star were rules of farcall's before the machine was simulated.
"""

from __future__ import annotations

import math
from enum import StrEnum

from farcall.protocol.connecting import (
    Address,
    Cause,
    Connecting,
    DialFailure,
    Instruction,
    Late,
    Pause,
    Talk,
    Try,
    WaitForDialler,
)


class _Mistakes(Connecting):
    """Takes one failure for another."""

    TAKES: dict[DialFailure, DialFailure]

    def failed(self, now: float, failure: DialFailure, jitter: float) -> Instruction:
        return super().failed(now, self.TAKES.get(failure, failure), jitter)


class _DeadByAnyError(_Mistakes):
    TAKES = dict.fromkeys((DialFailure.NO_ANSWER, DialFailure.TIMED_OUT), DialFailure.ABSENT)


class _CountsOwnFailures(_Mistakes):
    TAKES = {DialFailure.OF_THIS_MACHINE: DialFailure.NO_ANSWER}

    def _settle_silence(self) -> None:
        self._round_silent += 1.0
        super()._settle_silence()


class _TakesOwnFailuresForDeath(_Mistakes):
    TAKES = {DialFailure.OF_THIS_MACHINE: DialFailure.ABSENT}


class _GivesUpAtUnfinishedHandshake(_Mistakes):
    TAKES = {DialFailure.HANDSHAKE_UNFINISHED: DialFailure.ABSENT}


class _NeverTakesNo(_Mistakes):
    TAKES = {DialFailure.REFUSED: DialFailure.HANDSHAKE_UNFINISHED}


class _IgnoresAbsence(_Mistakes):
    TAKES = {DialFailure.ABSENT: DialFailure.NO_ANSWER}

    def _settle_silence(self) -> None:
        self._counts = False


class _IgnoresDeadline(Connecting):
    def _try(self, now: float) -> Try:
        said = super()._try(now)
        self._until = now + self._longest_try
        return Try(said.url, self._until)


class _TalksBeyondDeadline(Connecting):
    def connected(self, now: float) -> Talk:
        return Talk(max(super().connected(now).until, now + 10.0))


class _NeverCountsSilence(Connecting):
    def _settle_silence(self) -> None:
        super()._settle_silence()
        self.silent = 0.0


class _CountsTimeBetweenCalls(Connecting):
    def begin(self, caller: object, now: float, deadline: float) -> Instruction:
        if self.is_idle and self._counts:
            self.silent += max(0.0, now - self._until)
        return super().begin(caller, now, deadline)


class _CountsStandstills(Connecting):  # *
    def _note_silence(self, now: float, failure: DialFailure) -> None:
        super()._note_silence(now, failure)
        if failure in (DialFailure.NO_ANSWER, DialFailure.TIMED_OUT):
            self._round_silent += max(0.0, now - self._until)


class _OneRoundWillDo(Connecting):  # *
    def _settle_silence(self) -> None:
        super()._settle_silence()
        self._rounds *= 3


class _CountsShortTries(Connecting):  # *
    def __init__(self, addresses: tuple[Address, ...], dead_after: float) -> None:
        super().__init__(addresses, dead_after)
        self._proof = 0.0


class _OwnFailureEndsSilence(Connecting):  # *
    def _settle_silence(self) -> None:
        super()._settle_silence()
        if DialFailure.OF_THIS_MACHINE in self._failures:
            self.silent, self._rounds = 0.0, 0


class _StrangerEndsSilence(Connecting):  # *
    def connected(self, now: float) -> Talk:
        self.silent, self._rounds = 0.0, 0
        return super().connected(now)


class _LastRefusalIsFinal(Connecting):  # *
    def failed(self, now: float, failure: DialFailure, jitter: float) -> Instruction:
        if failure is DialFailure.REFUSED and self._left == 1:
            return self._die(Cause.REFUSED)
        return super().failed(now, failure, jitter)


class _IsLateTooSoon(Connecting):  # *
    def _wait(self, now: float, jitter: float) -> Pause | Late:  # type: ignore[override]
        said = super()._wait(now, jitter)
        return self._late() if said.until >= self._deadline else said


class _WaitsForSilentStrangers(Connecting):  # *
    def connected(self, now: float) -> Talk:
        said = super().connected(now)
        return Talk(now + self._share(now)) if said.until < self._deadline else said


class _GivesUpInTheEnd(Connecting):  # *
    _first = math.inf

    def _wait(self, now: float, jitter: float) -> Instruction:  # type: ignore[override]
        self._first = min(self._first, now)
        if now - self._first > 20.0:
            return self._die(Cause.ABSENT)
        return super()._wait(now, jitter)


class _BacksOffWithoutBound(Connecting):
    def _wait(self, now: float, jitter: float) -> Pause:
        pause = self._pause
        super()._wait(now, jitter)
        self._until = min(self._deadline, now + pause * (1 + jitter) / 2)
        self._pause = 2 * pause
        return Pause(self._until)


class _OnlyFirstAddress(Connecting):
    @property
    def _left(self) -> int:
        return 1


class _AllDial(Connecting):
    def begin(self, caller: object, now: float, deadline: float) -> Instruction:
        said = super().begin(caller, now, deadline)
        return self._begin_round(now) if isinstance(said, WaitForDialler) else said


class _KeepsItsPlace(Connecting):
    def left(self, caller: object) -> None:
        pass


class _FirstComeFirstServed(Connecting):  # *
    def begin(self, caller: object, now: float, deadline: float) -> Instruction:
        self._waiting.clear()
        return super().begin(caller, now, deadline)


class ConnectingBug(StrEnum):
    """Each is found by the simulator."""

    DEAD_BY_ANY_ERROR = "dead-by-any-error"
    COUNTS_OWN_FAILURES = "counts-own-failures"
    TAKES_OWN_FAILURES_FOR_DEATH = "takes-own-failures-for-death"
    GIVES_UP_AT_UNFINISHED_HANDSHAKE = "gives-up-at-unfinished-handshake"
    NEVER_TAKES_NO = "never-takes-no"
    IGNORES_ABSENCE = "ignores-absence"
    IGNORES_DEADLINE = "ignores-deadline"
    TALKS_BEYOND_DEADLINE = "talks-beyond-deadline"
    NEVER_COUNTS_SILENCE = "never-counts-silence"
    COUNTS_TIME_BETWEEN_CALLS = "counts-time-between-calls"
    COUNTS_STANDSTILLS = "counts-standstills"
    ONE_ROUND_WILL_DO = "one-round-will-do"
    COUNTS_SHORT_TRIES = "counts-short-tries"
    OWN_FAILURE_ENDS_SILENCE = "own-failure-ends-silence"
    STRANGER_ENDS_SILENCE = "stranger-ends-silence"
    LAST_REFUSAL_IS_FINAL = "last-refusal-is-final"
    IS_LATE_TOO_SOON = "is-late-too-soon"
    WAITS_FOR_SILENT_STRANGERS = "waits-for-silent-strangers"
    GIVES_UP_IN_THE_END = "gives-up-in-the-end"
    BACKS_OFF_WITHOUT_BOUND = "backs-off-without-bound"
    ONLY_FIRST_ADDRESS = "only-first-address"
    ALL_DIAL = "all-dial"
    KEEPS_ITS_PLACE = "keeps-its-place"
    FIRST_COME_FIRST_SERVED = "first-come-first-served"


_MACHINES: dict[ConnectingBug, type[Connecting]] = {
    ConnectingBug.DEAD_BY_ANY_ERROR: _DeadByAnyError,
    ConnectingBug.COUNTS_OWN_FAILURES: _CountsOwnFailures,
    ConnectingBug.TAKES_OWN_FAILURES_FOR_DEATH: _TakesOwnFailuresForDeath,
    ConnectingBug.GIVES_UP_AT_UNFINISHED_HANDSHAKE: _GivesUpAtUnfinishedHandshake,
    ConnectingBug.NEVER_TAKES_NO: _NeverTakesNo,
    ConnectingBug.IGNORES_ABSENCE: _IgnoresAbsence,
    ConnectingBug.IGNORES_DEADLINE: _IgnoresDeadline,
    ConnectingBug.TALKS_BEYOND_DEADLINE: _TalksBeyondDeadline,
    ConnectingBug.NEVER_COUNTS_SILENCE: _NeverCountsSilence,
    ConnectingBug.COUNTS_TIME_BETWEEN_CALLS: _CountsTimeBetweenCalls,
    ConnectingBug.COUNTS_STANDSTILLS: _CountsStandstills,
    ConnectingBug.ONE_ROUND_WILL_DO: _OneRoundWillDo,
    ConnectingBug.COUNTS_SHORT_TRIES: _CountsShortTries,
    ConnectingBug.OWN_FAILURE_ENDS_SILENCE: _OwnFailureEndsSilence,
    ConnectingBug.STRANGER_ENDS_SILENCE: _StrangerEndsSilence,
    ConnectingBug.LAST_REFUSAL_IS_FINAL: _LastRefusalIsFinal,
    ConnectingBug.IS_LATE_TOO_SOON: _IsLateTooSoon,
    ConnectingBug.WAITS_FOR_SILENT_STRANGERS: _WaitsForSilentStrangers,
    ConnectingBug.GIVES_UP_IN_THE_END: _GivesUpInTheEnd,
    ConnectingBug.BACKS_OFF_WITHOUT_BOUND: _BacksOffWithoutBound,
    ConnectingBug.ONLY_FIRST_ADDRESS: _OnlyFirstAddress,
    ConnectingBug.ALL_DIAL: _AllDial,
    ConnectingBug.KEEPS_ITS_PLACE: _KeepsItsPlace,
    ConnectingBug.FIRST_COME_FIRST_SERVED: _FirstComeFirstServed,
}


def machine_of(bug: ConnectingBug | None) -> type[Connecting]:
    """Return the machine, with that mistake if there is one."""
    return Connecting if bug is None else _MACHINES[bug]
