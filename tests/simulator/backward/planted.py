"""Mistakes planted in the machines of backward passes, to show that the simulator finds them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from farcall.protocol.contexts import Contexts, ReportHeld, TellEnd
from farcall.protocol.credit import WHOLE, HeldCredit, RecoveredCredit
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
from farcall.protocol.passes import PassMachine, PassState
from simulator.backward.machines import Machines
from simulator.backward.reach import SimulatedExploration, SimulatedReach

Todo = list[Instruction]


class _GivesAllAndKeepsHalf(HeldCredit):
    def send(self, source: int, last: bool = False) -> int:
        credit = self._credit[source]
        super().send(source, last)
        return credit


class _KeepsCredit(HeldCredit):
    def ran(self, source: int) -> int | None:
        super().ran(source)
        return None


class _GivesHalfAndKeepsAll(HeldCredit):
    def send(self, source: int, last: bool = False) -> int:
        return super().send(source, last=True) if last else self._credit[source] + 1


class _AddsOnce(RecoveredCredit):
    """Does not carry over."""

    def add(self, credit: int) -> bool:
        if credit in self._credit:
            self._credit.remove(credit)
            credit -= 1
        self._credit.add(credit)
        return credit == WHOLE


class _TakesHalfForAll(RecoveredCredit):
    def add(self, credit: int) -> bool:
        return super().add(credit) or WHOLE + 1 in self._credit


class _PreparesInHaste(PassMachine):
    """Answers as soon as one of the parts is prepared."""

    def prepared(self, reached: Part) -> Todo:
        asked = self._askers.pop(self._causes.pop(reached), None)
        return [] if asked is None else self._answer(asked[0])


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


class _AsksTheRootEachTime(PassMachine):
    """Has every gradient begin the shared part."""

    def begin(self, is_shared: bool) -> Todo:
        begun = self.state
        self.state = PassState.WAITING if begun is PassState.TOGETHER else begun
        return super().begin(is_shared)

    def arrive(self, source: int, credit: int) -> Todo:
        todo = super().arrive(source, credit)
        return todo or ([AskRoot()] if self.state is PassState.WAITING else [])


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
    """Leaves get their gradients after the last credit has gone."""

    def computed(self, source: int, receives: Mapping[Any, Any]) -> list[Any]:
        todo = super().computed(source, receives)
        return sorted(todo, key=lambda each: type(each) is KeepLeaves)


class _AveragesEarly(PassMachine):
    def ran(self, source: int) -> Todo:
        self._pending, pending = set(), self._pending
        todo = super().ran(source)
        self._pending = pending
        return todo


class _ForgetsTheDead(Contexts[Any]):
    def is_dead(self, context: int) -> bool:
        return False


class _ReportsOneWay(Contexts[Any]):
    """Tells the creator that it has the context, and of no failure before or after that."""

    def _link(self, context: int, creator: int) -> list[Any]:
        return [ReportHeld(creator, context)]


class _TakesCreatorsForAlive(Contexts[Any]):
    """Waits for the release of a context by a creator that is lost."""

    def made_by(self, creator: int) -> list[int]:
        return []

    def on_peer_lost(self, peer: int, id: int, **options: Any) -> list[Any]:
        return super().on_peer_lost(peer, id, **{**options, "living": lambda creator: creator})


class _LooksForNoHooks(SimulatedReach):
    """Gives a leaf with hooks its gradient in parts."""

    class explorer(SimulatedExploration):  # noqa: N801
        @staticmethod
        def has_hooks(leaf: Any) -> bool:
            return False


class _SharesNoMessages(SimulatedReach):
    """Lets two sources of a message that came send it back, each a part."""

    @property
    def is_shared(self) -> bool:
        return bool(self.exploration.is_shared)


def _without(instruction: Any, method: str, machine: type[Any] = PassMachine) -> type[Any]:
    """Return a machine whose method leaves such instructions out of what it returns."""

    def planted(self: Any, *args: Any, **options: Any) -> list[Any]:
        todo = getattr(machine, method)(self, *args, **options)
        return [each for each in todo if not isinstance(each, instruction)]

    return type("_Without", (machine,), {method: planted})


def _ignoring(event: str, machine: type[Any] = PassMachine) -> type[Any]:
    """Return a machine that does nothing at an event."""
    return type("_Ignoring", (machine,), {event: lambda *_, **__: []})


def _with(**attributes: type[Any]) -> type[PassMachine]:
    """Return a machine that counts credit in a wrong way."""
    return type("_With", (PassMachine,), attributes)


class BackwardBug(Enum):
    """The mistakes to plant: the name on the command line, and the machine that makes each."""

    planted: type[Any]

    def __new__(cls, value: str, planted: type[Any] = PassMachine) -> BackwardBug:
        bug = object.__new__(cls)
        bug._value_ = value
        bug.planted = planted
        return bug

    GIVES_ALL_AND_KEEPS_HALF = "gives-all-and-keeps-half", _with(credit=_GivesAllAndKeepsHalf)
    KEEPS_CREDIT = "keeps-credit", _with(credit=_KeepsCredit)
    GIVES_HALF_AND_KEEPS_ALL = "gives-half-and-keeps-all", _with(credit=_GivesHalfAndKeepsAll)
    ADDS_ONCE = "adds-once", _with(recovered_credit=_AddsOnce)
    TAKES_HALF_FOR_ALL = "takes-half-for-all", _with(recovered_credit=_TakesHalfForAll)
    PREPARES_IN_HASTE = "prepares-in-haste", _PreparesInHaste
    FORGETS_ANSWERS = "forgets-answers", _without(AnswerAsker, "prepared")
    WAITS_IN_ASCENDING_ORDER = "waits-in-ascending-order", _WaitsInAscendingOrder
    ONLY_NEWEST_SOURCES = "only-newest-sources", _OnlyNewestSources
    MISSES_NOTHING = "misses-nothing", _MissesNothing
    RUNS_IN_HASTE = "runs-in-haste", _RunsInHaste
    RUNS_SHARED_APART = "runs-shared-apart", _RunsSharedApart
    FORGETS_EARLY_GRADIENTS = "forgets-early-gradients", _without(RunSource, "begin")
    ASKS_THE_ROOT_EACH_TIME = "asks-the-root-each-time", _AsksTheRootEachTime
    SURVEYS_ONCE = "surveys-once", _SurveysOnce
    SURVEYS_IN_HASTE = "surveys-in-haste", _SurveysInHaste
    SENDS_INCOMPLETE = "sends-incomplete", _SendsIncomplete
    SENDS_ONE_RECEIVE = "sends-one-receive", _SendsOneReceive
    GIVES_ALL_BEFORE_AVERAGING = "gives-all-before-averaging", _GivesAllBeforeAveraging
    ACCUMULATES_LATE = "accumulates-late", _AccumulatesLate
    AVERAGES_EARLY = "averages-early", _AveragesEarly
    IGNORES_DEATHS = "ignores-deaths", _ignoring("on_peer_lost")
    DOES_NOT_ASK_WHY = "does-not-ask-why", _without(AskCause, "pass_failed")
    FAILS_IN_SILENCE = "fails-in-silence", _without(TellRoot, "fail")
    TELLS_NOBODY = "tells-nobody", _without(TellAll, "abort")
    LEAVES_ASKERS_WAITING = "leaves-askers-waiting", _without(AnswerAsker, "stop")
    LOOKS_FOR_NO_HOOKS = "looks-for-no-hooks", _LooksForNoHooks
    SHARES_NO_MESSAGES = "shares-no-messages", _SharesNoMessages
    FORGETS_THE_DEAD = "forgets-the-dead", _ForgetsTheDead
    RELEASES_ONLY_HERE = "releases-only-here", _without(TellEnd, "_drop", Contexts)
    DOES_NOT_REPORT = "does-not-report", _without(ReportHeld, "on_peer_lost", Contexts)
    LEAVES_CONTEXTS_OF_THE_DEAD = "leaves-contexts-of-the-dead", _TakesCreatorsForAlive
    REPORTS_ONE_WAY = "reports-one-way", _ReportsOneWay
    IGNORES_REPORTS = "ignores-reports", _ignoring("held", Contexts)


def machines_with(bug: BackwardBug | None) -> Machines:
    """Return the machines as they are, or with one mistake."""
    if bug is None:
        return Machines()
    if issubclass(bug.planted, Contexts):
        return Machines(contexts=bug.planted)
    if issubclass(bug.planted, SimulatedReach):
        return Machines(reach=bug.planted)
    return Machines(passes=bug.planted)
