"""Mistakes planted in the machines of backward passes, to show that the simulator finds them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from farcall.protocol.backward import WHOLE, Backward, Returned
from farcall.protocol.contexts import Contexts, Report
from farcall.testing.backward.history import Node
from farcall.testing.backward.passes import Pass
from farcall.testing.backward.worker import Machines


class _GivesAllAndKeepsHalf(Backward):
    def send(self, source: int, last: bool = False) -> int:
        share = self._shares[source]
        super().send(source, last)
        return share


class _KeepsAShare(Backward):
    def ran(self, source: int) -> int | None:
        super().ran(source)
        return None


class _GivesHalfAndKeepsAll(Backward):
    def send(self, source: int, last: bool = False) -> int:
        return super().send(source, last=True) if last else self._shares[source] + 1


class _PreparesInHaste(Backward):
    def reach(self, source: int, part: Hashable, parts: Iterable[Hashable]) -> None:
        parts = list(parts)
        super().reach(source, part, parts)
        if len(parts) > 1:
            self._waiting[part] = 1

    def prepared(self, reached: Hashable) -> Hashable | None:
        came = self._causes.pop(reached)
        return came if self._waiting.pop(came, None) is not None else None


class _ForgetsAnswers(Backward):
    def prepared(self, reached: Hashable) -> Hashable | None:
        super().prepared(reached)
        return None


class _WaitsInAscendingOrder(Backward):
    def begin(self) -> list[int]:
        return super().begin()[::-1]


class _OnlyNewestSources(Backward):
    def begin(self) -> list[int]:
        sources = super().begin()
        return sources[: max(1, len(sources) - 1)]


class _MissesNothing(Backward):
    @property
    def missing(self) -> int:
        return 0


class _AddsOnce(Returned):
    """Does not carry over."""

    def add(self, share: int) -> bool:
        if share in self._shares:
            self._shares.remove(share)
            share -= 1
        self._shares.add(share)
        return share == WHOLE


class _TakesHalfForAll(Returned):
    def add(self, share: int) -> bool:
        return super().add(share) or WHOLE + 1 in self._shares


class _IgnoresDeaths(Pass):
    def lost(self, peer: int) -> None:
        pass


class _DoesNotAskWhy(Pass):
    def broken(self, peer: int) -> None:
        pass


class _AccumulatesLate(Pass):
    """Leaves get their gradients after the last share has gone."""

    def _accumulate(self, found: Mapping[Node, int]) -> None:
        def later() -> Any:
            yield True
            super(_AccumulatesLate, self)._accumulate(found)

        self._world.start(self._worker.id, later(), self._expire)


class _ForgetsTheDead(Contexts[Any]):
    def is_dead(self, context: int) -> bool:
        return False


class _ReleasesOnlyHere(Contexts[Any]):
    def _drop(self, context: int, floor: int) -> list[Any]:
        return super()._drop(context, floor)[:1]


class _DoesNotReport(Contexts[Any]):
    def lost(self, *args: Any, **options: Any) -> list[Any]:
        return [each for each in super().lost(*args, **options) if type(each) is not Report]


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
    IGNORES_DEATHS = "ignores-deaths"
    DOES_NOT_ASK_WHY = "does-not-ask-why"
    ACCUMULATES_LATE = "accumulates-late"
    FORGETS_THE_DEAD = "forgets-the-dead"
    RELEASES_ONLY_HERE = "releases-only-here"
    DOES_NOT_REPORT = "does-not-report"
    LEAVES_CONTEXTS_OF_THE_DEAD = "leaves-contexts-of-the-dead"
    IGNORES_REPORTS = "ignores-reports"


_PLANTS: dict[BackwardBug, Machines] = {
    BackwardBug.GIVES_ALL_AND_KEEPS_HALF: Machines(backward=_GivesAllAndKeepsHalf),
    BackwardBug.KEEPS_A_SHARE: Machines(backward=_KeepsAShare),
    BackwardBug.GIVES_HALF_AND_KEEPS_ALL: Machines(backward=_GivesHalfAndKeepsAll),
    BackwardBug.ADDS_ONCE: Machines(returned=_AddsOnce),
    BackwardBug.TAKES_HALF_FOR_ALL: Machines(returned=_TakesHalfForAll),
    BackwardBug.PREPARES_IN_HASTE: Machines(backward=_PreparesInHaste),
    BackwardBug.FORGETS_ANSWERS: Machines(backward=_ForgetsAnswers),
    BackwardBug.WAITS_IN_ASCENDING_ORDER: Machines(backward=_WaitsInAscendingOrder),
    BackwardBug.ONLY_NEWEST_SOURCES: Machines(backward=_OnlyNewestSources),
    BackwardBug.MISSES_NOTHING: Machines(backward=_MissesNothing),
    BackwardBug.IGNORES_DEATHS: Machines(passes=_IgnoresDeaths),
    BackwardBug.DOES_NOT_ASK_WHY: Machines(passes=_DoesNotAskWhy),
    BackwardBug.ACCUMULATES_LATE: Machines(passes=_AccumulatesLate),
    BackwardBug.FORGETS_THE_DEAD: Machines(contexts=_ForgetsTheDead),
    BackwardBug.RELEASES_ONLY_HERE: Machines(contexts=_ReleasesOnlyHere),
    BackwardBug.DOES_NOT_REPORT: Machines(contexts=_DoesNotReport),
    BackwardBug.LEAVES_CONTEXTS_OF_THE_DEAD: Machines(contexts=_LeavesContextsOfTheDead),
    BackwardBug.IGNORES_REPORTS: Machines(contexts=_IgnoresReports),
}


def machines_with(bug: BackwardBug | None) -> Machines:
    """The machines as they are, or with one mistake."""
    return Machines() if bug is None else _PLANTS[bug]
