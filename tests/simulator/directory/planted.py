"""Mistakes planted in the machines of the directory, to show that the simulator would find them.

Those marked with a star were rules of farcall's before the machines were simulated.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from farcall.ids import Worker
from farcall.protocol.directory import DirectoryMachine, Found, Key, Standing, Verdict
from farcall.protocol.lookup import LookupMachine, Round
from simulator.directory.world import Record

_Machine = DirectoryMachine[Record]
_Lookup = LookupMachine[Any]


class _LostTakesNames(_Machine):  # *
    def add(self, worker: Worker) -> Record:
        record = super().add(worker)
        for key in (worker.name, worker.id, worker.info):
            self._by_key[key] = record
        return record


class _LostKeepsNames(_Machine):  # *
    def _pass_keys_on(self, party: Record) -> None:
        pass


class _TellsOfNewcomersOnly(_Machine):
    def _tell_of(self, name: str) -> None:
        if self._present.get(name) is None:
            super()._tell_of(name)


class _UnknownMeetAtFirst(_Machine):  # *
    def meet_again(self, incarnation: int, meeting: int, now: float) -> bool:
        if self.newest(incarnation) is None:
            return False
        return super().meet_again(incarnation, meeting, now)


class _KeepsNumbersOfUnknown(_Machine):
    def meet_again(self, incarnation: int, meeting: int, now: float) -> bool:
        known = super().meet_again(incarnation, meeting, now)
        if not known and self.newest(incarnation) is None and self._discarded:
            self._discarded.pop()
        return known


class _RepeatsTheMeeting(_Machine):
    def meeting(self, incarnation: int) -> int:
        record = self.newest(incarnation)
        return super().meeting(incarnation) - (record is not None and record.loss_cause is not None)


class _RevivesTheLost(_RepeatsTheMeeting):
    def verdict(self, incarnation: int, meeting: int) -> Verdict:
        record = self.newest(incarnation)
        if record is not None:
            record.loss_cause = None
        return super().verdict(incarnation, meeting)


class _WelcomesAnyLaterMeeting(_Machine):
    def verdict(self, incarnation: int, meeting: int) -> Verdict:
        verdict = super().verdict(incarnation, meeting)
        return Verdict.WELCOME if verdict is Verdict.ANEW else verdict


class _NeverTakesBack(_Machine):
    def verdict(self, incarnation: int, meeting: int) -> Verdict:
        record = self.newest(incarnation)
        is_lost = record is not None and record.loss_cause is not None
        return Verdict.GIVEN_UP if is_lost else super().verdict(incarnation, meeting)


class _CountsFromItsOwn(_Machine):
    def meet_again(self, incarnation: int, meeting: int, now: float) -> bool:
        return super().meet_again(incarnation, self.meeting(incarnation), now)


class _ForgetsTheNumber(_Machine):
    def _drop(self, old: Record, now: float) -> None:
        super()._drop(old, now)
        self._met_again.pop(old.worker.incarnation, None)


class _KeepsNumbers(_Machine):
    def on_peer_lost(self, party: Record, now: float) -> list[int]:
        numbers = dict(self._met_again)
        gone = super().on_peer_lost(party, now)
        self._met_again = numbers | self._met_again
        return gone


class _ForgetsNobody(_Machine):
    def _drop(self, old: Record, now: float) -> None:
        pass


class _ForgetsAtOnceEverywhere(_Machine):
    def on_peer_lost(self, party: Record, now: float) -> list[int]:
        before = set(self._by_incarnation)
        return super().on_peer_lost(party, now) + list(before - set(self._by_incarnation))


class _KeepsEarlierMeetings(_Machine):
    def meet_again(self, incarnation: int, meeting: int, now: float) -> bool:
        was, self.is_open = self.is_open, True
        met = super().meet_again(incarnation, meeting, now)
        self.is_open = was
        return met


class _DoesNotAsk(_Machine):
    def resolve(self, to: Key, *, asked: bool = False) -> Found[Record]:
        found = super().resolve(to, asked=asked)
        if found.standing is Standing.ASK and found.party is not None:
            return Found(Standing.LOST, found.party)
        return found


class _AsksForEach(_Lookup):
    def ask(self, question: Any) -> tuple[Any, int | None]:
        self._open[question.key] = question
        return question, self._connection


class _NeverAsksAnew(_Lookup):
    def look(self, now: float) -> Round[Any] | None:
        return None


class _AsksAnewWithoutBound(_Lookup):
    def look(self, now: float) -> Round[Any] | None:
        self._stuck = 0
        return super().look(now)


class _AsksOneAnew(_Lookup):
    def look(self, now: float) -> Round[Any] | None:
        said = super().look(now)
        return said and Round(said.connection, said.questions[:1])


class _HearsOldConnections(_Lookup):
    def ends(self, question: Any, connection: int, *, found: bool | None) -> bool:
        super().ends(question, connection, found=found)
        return self._open.pop(question.key, question) is question


class _NeverUnstuck(_Lookup):
    def ends(self, question: Any, connection: int, *, found: bool | None) -> bool:
        stuck = self._stuck
        counts = super().ends(question, connection, found=found)
        self._stuck = stuck
        return counts


class _NeverMorePatient(_Lookup):  # *
    def look(self, now: float) -> Round[Any] | None:
        self._patience = 1
        return super().look(now)


class _AnswersWhoJoins(_Lookup):
    def ask(self, question: Any) -> tuple[Any, int | None]:
        said = super().ask(question)
        self._is_joined = False
        return said


class DirectoryBug(StrEnum):
    """Each is found by the simulator."""

    LOST_TAKES_NAMES = "lost-takes-names"
    LOST_KEEPS_NAMES = "lost-keeps-names"
    UNKNOWN_MEET_AT_FIRST = "unknown-meet-at-first"
    KEEPS_NUMBERS_OF_UNKNOWN = "keeps-numbers-of-unknown"
    REPEATS_THE_MEETING = "repeats-the-meeting"
    REVIVES_THE_LOST = "revives-the-lost"
    WELCOMES_ANY_LATER_MEETING = "welcomes-any-later-meeting"
    NEVER_TAKES_BACK = "never-takes-back"
    COUNTS_FROM_ITS_OWN = "counts-from-its-own"
    FORGETS_THE_NUMBER = "forgets-the-number"
    KEEPS_NUMBERS = "keeps-numbers"
    FORGETS_NOBODY = "forgets-nobody"
    FORGETS_AT_ONCE_EVERYWHERE = "forgets-at-once-everywhere"
    KEEPS_EARLIER_MEETINGS = "keeps-earlier-meetings"
    DOES_NOT_ASK = "does-not-ask"
    ASKS_FOR_EACH = "asks-for-each"
    NEVER_ASKS_ANEW = "never-asks-anew"
    ASKS_ANEW_WITHOUT_BOUND = "asks-anew-without-bound"
    ASKS_ONE_ANEW = "asks-one-anew"
    HEARS_OLD_CONNECTIONS = "hears-old-connections"
    NEVER_UNSTUCK = "never-unstuck"
    NEVER_MORE_PATIENT = "never-more-patient"
    ANSWERS_WHO_JOINS = "answers-who-joins"
    TELLS_OF_NEWCOMERS_ONLY = "tells-of-newcomers-only"


_DIRECTORIES: dict[DirectoryBug | None, type[_Machine]] = {
    DirectoryBug.LOST_TAKES_NAMES: _LostTakesNames,
    DirectoryBug.LOST_KEEPS_NAMES: _LostKeepsNames,
    DirectoryBug.UNKNOWN_MEET_AT_FIRST: _UnknownMeetAtFirst,
    DirectoryBug.KEEPS_NUMBERS_OF_UNKNOWN: _KeepsNumbersOfUnknown,
    DirectoryBug.REPEATS_THE_MEETING: _RepeatsTheMeeting,
    DirectoryBug.REVIVES_THE_LOST: _RevivesTheLost,
    DirectoryBug.WELCOMES_ANY_LATER_MEETING: _WelcomesAnyLaterMeeting,
    DirectoryBug.NEVER_TAKES_BACK: _NeverTakesBack,
    DirectoryBug.COUNTS_FROM_ITS_OWN: _CountsFromItsOwn,
    DirectoryBug.FORGETS_THE_NUMBER: _ForgetsTheNumber,
    DirectoryBug.KEEPS_NUMBERS: _KeepsNumbers,
    DirectoryBug.FORGETS_NOBODY: _ForgetsNobody,
    DirectoryBug.FORGETS_AT_ONCE_EVERYWHERE: _ForgetsAtOnceEverywhere,
    DirectoryBug.KEEPS_EARLIER_MEETINGS: _KeepsEarlierMeetings,
    DirectoryBug.DOES_NOT_ASK: _DoesNotAsk,
    DirectoryBug.TELLS_OF_NEWCOMERS_ONLY: _TellsOfNewcomersOnly,
}
_LOOKUPS: dict[DirectoryBug | None, type[_Lookup]] = {
    DirectoryBug.ASKS_FOR_EACH: _AsksForEach,
    DirectoryBug.NEVER_ASKS_ANEW: _NeverAsksAnew,
    DirectoryBug.ASKS_ANEW_WITHOUT_BOUND: _AsksAnewWithoutBound,
    DirectoryBug.ASKS_ONE_ANEW: _AsksOneAnew,
    DirectoryBug.HEARS_OLD_CONNECTIONS: _HearsOldConnections,
    DirectoryBug.NEVER_UNSTUCK: _NeverUnstuck,
    DirectoryBug.NEVER_MORE_PATIENT: _NeverMorePatient,
    DirectoryBug.ANSWERS_WHO_JOINS: _AnswersWhoJoins,
}


def directory_of(bug: DirectoryBug | None) -> type[_Machine]:
    """Return the directory with that mistake, or as it ships."""
    return _DIRECTORIES.get(bug, DirectoryMachine)


def lookup_of(bug: DirectoryBug | None) -> type[_Lookup]:
    """Return the same for questions to the store."""
    return _LOOKUPS.get(bug, LookupMachine)
