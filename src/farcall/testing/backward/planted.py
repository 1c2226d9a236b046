"""Mistakes planted in the machines of backward passes, to show that the simulator finds them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import StrEnum
from typing import Any

from farcall.protocol.backward import Backward
from farcall.protocol.contexts import Contexts, Dropped
from farcall.testing.backward.worker import Machines


class _AnswersEarly(Backward):
    def ran(self, source: int) -> bool:
        super().ran(source)
        return True


class _ForgetsAnswers(Backward):
    def answered(self, receive: Hashable) -> Hashable | None:
        super().answered(receive)
        return None


class _PreparesInHaste(Backward):
    def reach(self, source: int, part: Hashable, parts: Iterable[Hashable]) -> None:
        parts = list(parts)
        super().reach(source, part, parts)
        if len(parts) > 1:
            self._waiting[part] = 1

    def prepared(self, reached: Hashable) -> Hashable | None:
        came = self._causes.pop(reached)
        return came if self._waiting.pop(came, None) is not None else None


class _WaitsInAscendingOrder(Backward):
    def begin(self) -> list[int]:
        return super().begin()[::-1]


class _OnlyNewestSources(Backward):
    def begin(self) -> list[int]:
        sources = super().begin()
        return sources[: max(1, len(sources) - 1)]


class _ForgetsTheDead(Contexts[Any]):
    def is_dead(self, context: int) -> bool:
        return False


class _ReleasesOnlyHere(Contexts[Any]):
    def _drop(self, context: int) -> Dropped[Any]:
        return super()._drop(context)._replace(told=())


class _DoesNotReport(Contexts[Any]):
    def lost(self, peer: int) -> list[int]:
        super().lost(peer)
        return []


class _IgnoresReports(Contexts[Any]):
    def held(self, context: int, peer: int) -> int:
        return 0


class BackwardBug(StrEnum):
    """What to do wrong."""

    ANSWERS_EARLY = "answers-early"
    FORGETS_ANSWERS = "forgets-answers"
    PREPARES_IN_HASTE = "prepares-in-haste"
    WAITS_IN_ASCENDING_ORDER = "waits-in-ascending-order"
    ONLY_NEWEST_SOURCES = "only-newest-sources"
    FORGETS_THE_DEAD = "forgets-the-dead"
    RELEASES_ONLY_HERE = "releases-only-here"
    DOES_NOT_REPORT = "does-not-report"
    IGNORES_REPORTS = "ignores-reports"


_PLANTS: dict[BackwardBug, Machines] = {
    BackwardBug.ANSWERS_EARLY: Machines(backward=_AnswersEarly),
    BackwardBug.FORGETS_ANSWERS: Machines(backward=_ForgetsAnswers),
    BackwardBug.PREPARES_IN_HASTE: Machines(backward=_PreparesInHaste),
    BackwardBug.WAITS_IN_ASCENDING_ORDER: Machines(backward=_WaitsInAscendingOrder),
    BackwardBug.ONLY_NEWEST_SOURCES: Machines(backward=_OnlyNewestSources),
    BackwardBug.FORGETS_THE_DEAD: Machines(contexts=_ForgetsTheDead),
    BackwardBug.RELEASES_ONLY_HERE: Machines(contexts=_ReleasesOnlyHere),
    BackwardBug.DOES_NOT_REPORT: Machines(contexts=_DoesNotReport),
    BackwardBug.IGNORES_REPORTS: Machines(contexts=_IgnoresReports),
}


def machines_with(bug: BackwardBug | None) -> Machines:
    """The machines as they are, or with one mistake."""
    return Machines() if bug is None else _PLANTS[bug]
