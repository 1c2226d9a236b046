"""Mistakes planted in the machines of backward passes, to show that the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from farcall.protocol.contexts import Contexts, ReportHeld
from farcall.protocol.pass_instructions import (
    AnswerAsker,
    AskCause,
    AskRoot,
    Instruction,
    KeepLeaves,
    Part,
    RunSource,
    SendGradients,
    TellAll,
    TellRoot,
)
from farcall.protocol.passes import PassMachine, State
from farcall.protocol.shares import WHOLE, Returned, Shares
from farcall.testing.backward.worker import Machines

Todo = list[Instruction]


class _SharesGiveAllAndKeepHalf(Shares):
    def send(self, source: int, last: bool = False) -> int:
        share = self._shares[source]
        super().send(source, last)
        return share


class _GivesAllAndKeepsHalf(PassMachine):
    shares = _SharesGiveAllAndKeepHalf


class _SharesKeptHere(Shares):
    def ran(self, source: int) -> int | None:
        super().ran(source)
        return None


class _KeepsAShare(PassMachine):
    shares = _SharesKeptHere


class _SharesGiveHalfAndKeepAll(Shares):
    def send(self, source: int, last: bool = False) -> int:
        return super().send(source, last=True) if last else self._shares[source] + 1


class _GivesHalfAndKeepsAll(PassMachine):
    shares = _SharesGiveHalfAndKeepAll


class _AddedOnce(Returned):
    """Does not carry over."""

    def add(self, share: int) -> bool:
        if share in self._shares:
            self._shares.remove(share)
            share -= 1
        self._shares.add(share)
        return share == WHOLE


class _AddsOnce(PassMachine):
    returned_shares = _AddedOnce


class _HalfTakenForAll(Returned):
    def add(self, share: int) -> bool:
        return super().add(share) or WHOLE + 1 in self._shares


class _TakesHalfForAll(PassMachine):
    returned_shares = _HalfTakenForAll


class _PreparesInHaste(PassMachine):
    """Answers as soon as one of the parts is prepared."""

    def prepared(self, reached: Part) -> Todo:
        asked = self._askers.pop(self._causes.pop(reached), None)
        return [] if asked is None else self._answer(asked[0])


class _ForgetsAnswers(PassMachine):
    def prepared(self, reached: Part) -> Todo:
        super().prepared(reached)
        return []


class _WaitsInAscendingOrder(PassMachine):
    def _in_order(self) -> list[int]:
        return super()._in_order()[::-1]


class _OnlyNewestSources(PassMachine):
    def _in_order(self) -> list[int]:
        sources = super()._in_order()
        return sources[: max(1, len(sources) - 1)]


class _MissesNothing(PassMachine):
    @property
    def missing(self) -> int:
        return 0


class _RunsInHaste(PassMachine):
    """Runs each source when its gradient comes, though others share nodes with it."""

    def explored(self, is_shared: bool, *, has_sent: bool = True) -> None:
        super().explored(False, has_sent=has_sent)


class _RunsSharedApart(PassMachine):
    def begin(self, is_shared: bool) -> Todo:
        return super().begin(False)


class _ForgetsEarlyGradients(PassMachine):
    """Runs none of the sources whose gradients came before the live ones were known."""

    def begin(self, is_shared: bool) -> Todo:
        return [each for each in super().begin(is_shared) if type(each) is not RunSource]


class _AsksTheRootEachTime(PassMachine):
    """Has every gradient begin what is shared."""

    def begin(self, is_shared: bool) -> Todo:
        begun = self.state
        self.state = State.WAITING if begun is State.TOGETHER else begun
        return super().begin(is_shared)

    def arrive(self, source: int, share: int) -> Todo:
        todo = super().arrive(source, share)
        return todo or ([AskRoot()] if self.state is State.WAITING else [])


class _SurveysOnce(PassMachine):
    """Answers only the first worker that must know the live sources."""

    def survey(self, asker: Any) -> Todo:
        return [] if self._surveyors else super().survey(asker)


class _SurveysInHaste(PassMachine):
    def survey(self, asker: Any) -> Todo:
        return [*super().survey(asker), AnswerAsker(asker, None)]


class _SendsIncomplete(PassMachine):
    """Sends the gradients of a receive when one of its tensors has its own."""

    def left(self, source: int, receive: Any, peer: Any) -> list[SendGradients]:
        self._incomplete[receive] = 1
        return super().left(source, receive, peer)


class _SendsOneReceive(PassMachine):
    def computed(self, source: int, receives: Mapping[Any, Any]) -> list[Any]:
        return super().computed(source, dict(list(receives.items())[:1]))


class _GivesAllBeforeAveraging(PassMachine):
    def computed(self, source: int, receives: Mapping[Any, Any]) -> list[Any]:
        self._averages, averages = False, self._averages
        todo = super().computed(source, receives)
        self._averages = averages
        return todo


class _AccumulatesLate(PassMachine):
    """Leaves get their gradients after the last share has gone."""

    def computed(self, source: int, receives: Mapping[Any, Any]) -> list[Any]:
        todo = super().computed(source, receives)
        return sorted(todo, key=lambda each: type(each) is KeepLeaves)


class _AveragesEarly(PassMachine):
    def ran(self, source: int) -> Todo:
        self._pending, pending = set(), self._pending
        todo = super().ran(source)
        self._pending = pending
        return todo


class _IgnoresDeaths(PassMachine):
    def lost(self, peer: Any, worker: object, error: Any) -> Todo:
        return []


def _without(*left_out: type[Any]) -> Callable[[Iterable[Any]], list[Any]]:
    return lambda todo: [each for each in todo if type(each) not in left_out]


class _DoesNotAskWhy(PassMachine):
    def broken(self, peer: Any) -> Todo:
        return _without(AskCause)(super().broken(peer))


class _FailsInSilence(PassMachine):
    def fail(self, error: Any) -> Todo:
        return _without(TellRoot)(super().fail(error))


class _TellsNobody(PassMachine):
    def abort(self, error: Any) -> Todo:
        return _without(TellAll)(super().abort(error))


class _LeavesAskersWaiting(PassMachine):
    def stop(self, error: Any) -> Todo:
        return _without(AnswerAsker)(super().stop(error))


class _ForgetsTheDead(Contexts[Any]):
    def is_dead(self, context: int) -> bool:
        return False


class _ReleasesOnlyHere(Contexts[Any]):
    def _drop(self, context: int, floor: int) -> list[Any]:
        return super()._drop(context, floor)[:1]


class _DoesNotReport(Contexts[Any]):
    def lost(self, *args: Any, **options: Any) -> list[Any]:
        return [each for each in super().lost(*args, **options) if type(each) is not ReportHeld]


class _LeavesContextsOfTheDead(Contexts[Any]):
    def made_by(self, creator: int) -> list[int]:
        return []


class _IgnoresReports(Contexts[Any]):
    def held(self, context: int, peer: int) -> list[Any]:
        return []


class BackwardBug(StrEnum):
    """What to do wrong."""

    GIVES_ALL_AND_KEEPS_HALF = "gives-all-and-keeps-half"
    KEEPS_A_SHARE = "keeps-a-share"
    GIVES_HALF_AND_KEEPS_ALL = "gives-half-and-keeps-all"
    ADDS_ONCE = "adds-once"
    TAKES_HALF_FOR_ALL = "takes-half-for-all"
    PREPARES_IN_HASTE = "prepares-in-haste"
    FORGETS_ANSWERS = "forgets-answers"
    WAITS_IN_ASCENDING_ORDER = "waits-in-ascending-order"
    ONLY_NEWEST_SOURCES = "only-newest-sources"
    MISSES_NOTHING = "misses-nothing"
    RUNS_IN_HASTE = "runs-in-haste"
    RUNS_SHARED_APART = "runs-shared-apart"
    FORGETS_EARLY_GRADIENTS = "forgets-early-gradients"
    ASKS_THE_ROOT_EACH_TIME = "asks-the-root-each-time"
    SURVEYS_ONCE = "surveys-once"
    SURVEYS_IN_HASTE = "surveys-in-haste"
    SENDS_INCOMPLETE = "sends-incomplete"
    SENDS_ONE_RECEIVE = "sends-one-receive"
    GIVES_ALL_BEFORE_AVERAGING = "gives-all-before-averaging"
    ACCUMULATES_LATE = "accumulates-late"
    AVERAGES_EARLY = "averages-early"
    IGNORES_DEATHS = "ignores-deaths"
    DOES_NOT_ASK_WHY = "does-not-ask-why"
    FAILS_IN_SILENCE = "fails-in-silence"
    TELLS_NOBODY = "tells-nobody"
    LEAVES_ASKERS_WAITING = "leaves-askers-waiting"
    FORGETS_THE_DEAD = "forgets-the-dead"
    RELEASES_ONLY_HERE = "releases-only-here"
    DOES_NOT_REPORT = "does-not-report"
    LEAVES_CONTEXTS_OF_THE_DEAD = "leaves-contexts-of-the-dead"
    IGNORES_REPORTS = "ignores-reports"


_PLANTS: dict[BackwardBug, Machines] = {
    BackwardBug.GIVES_ALL_AND_KEEPS_HALF: Machines(passes=_GivesAllAndKeepsHalf),
    BackwardBug.KEEPS_A_SHARE: Machines(passes=_KeepsAShare),
    BackwardBug.GIVES_HALF_AND_KEEPS_ALL: Machines(passes=_GivesHalfAndKeepsAll),
    BackwardBug.ADDS_ONCE: Machines(passes=_AddsOnce),
    BackwardBug.TAKES_HALF_FOR_ALL: Machines(passes=_TakesHalfForAll),
    BackwardBug.PREPARES_IN_HASTE: Machines(passes=_PreparesInHaste),
    BackwardBug.FORGETS_ANSWERS: Machines(passes=_ForgetsAnswers),
    BackwardBug.WAITS_IN_ASCENDING_ORDER: Machines(passes=_WaitsInAscendingOrder),
    BackwardBug.ONLY_NEWEST_SOURCES: Machines(passes=_OnlyNewestSources),
    BackwardBug.MISSES_NOTHING: Machines(passes=_MissesNothing),
    BackwardBug.RUNS_IN_HASTE: Machines(passes=_RunsInHaste),
    BackwardBug.RUNS_SHARED_APART: Machines(passes=_RunsSharedApart),
    BackwardBug.FORGETS_EARLY_GRADIENTS: Machines(passes=_ForgetsEarlyGradients),
    BackwardBug.ASKS_THE_ROOT_EACH_TIME: Machines(passes=_AsksTheRootEachTime),
    BackwardBug.SURVEYS_ONCE: Machines(passes=_SurveysOnce),
    BackwardBug.SURVEYS_IN_HASTE: Machines(passes=_SurveysInHaste),
    BackwardBug.SENDS_INCOMPLETE: Machines(passes=_SendsIncomplete),
    BackwardBug.SENDS_ONE_RECEIVE: Machines(passes=_SendsOneReceive),
    BackwardBug.GIVES_ALL_BEFORE_AVERAGING: Machines(passes=_GivesAllBeforeAveraging),
    BackwardBug.ACCUMULATES_LATE: Machines(passes=_AccumulatesLate),
    BackwardBug.AVERAGES_EARLY: Machines(passes=_AveragesEarly),
    BackwardBug.IGNORES_DEATHS: Machines(passes=_IgnoresDeaths),
    BackwardBug.DOES_NOT_ASK_WHY: Machines(passes=_DoesNotAskWhy),
    BackwardBug.FAILS_IN_SILENCE: Machines(passes=_FailsInSilence),
    BackwardBug.TELLS_NOBODY: Machines(passes=_TellsNobody),
    BackwardBug.LEAVES_ASKERS_WAITING: Machines(passes=_LeavesAskersWaiting),
    BackwardBug.FORGETS_THE_DEAD: Machines(contexts=_ForgetsTheDead),
    BackwardBug.RELEASES_ONLY_HERE: Machines(contexts=_ReleasesOnlyHere),
    BackwardBug.DOES_NOT_REPORT: Machines(contexts=_DoesNotReport),
    BackwardBug.LEAVES_CONTEXTS_OF_THE_DEAD: Machines(contexts=_LeavesContextsOfTheDead),
    BackwardBug.IGNORES_REPORTS: Machines(contexts=_IgnoresReports),
}


def machines_with(bug: BackwardBug | None) -> Machines:
    """The machines as they are, or with one mistake."""
    return Machines() if bug is None else _PLANTS[bug]
