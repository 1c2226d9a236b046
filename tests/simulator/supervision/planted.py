"""Mistakes planted in the rules of succession, to show that the simulator would find them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from farcall.protocol.knowledge import Knowledge
from farcall.protocol.leading import Leading
from farcall.protocol.standing import Edition, Keeper, Number, SupervisionState, Term
from farcall.protocol.succession import Editions, KeptSnapshots
from farcall.protocol.supervision_instructions import Present, Started


class _HigherGenerationStays(Editions[Any]):
    def _is_outdated(self, child: int, edition: Edition, state: SupervisionState) -> bool:
        higher = edition.generation > state.children[child].edition.generation
        return not higher and super()._is_outdated(child, edition, state)


class _GenerationIsAnEdition(Editions[Any]):
    def _is_outdated(self, child: int, edition: Edition, state: SupervisionState) -> bool:
        standing = state.children[child].edition
        is_named = edition.generation == standing.generation
        return super()._is_outdated(child, standing if is_named else edition, state)


class _DropsWhatWasAskedForLater(Editions[Any]):
    def _is_outdated(self, child: int, edition: Edition, state: SupervisionState) -> bool:
        is_other = edition != state.children[child].edition
        return is_other or super()._is_outdated(child, edition, state)


class _KeepsWhatIsOver(Editions[Any]):
    def _is_outdated(self, child: int, edition: Edition, state: SupervisionState) -> bool:
        return not state.is_over and super()._is_outdated(child, edition, state)


class _MakesWhatIsOutdated(Editions[Any]):
    def make(
        self, child: int, edition: Edition, made: Any, state: SupervisionState | None
    ) -> tuple[bool, list[Any]]:
        return super().make(child, edition, made, None)


class _LeavesTheEarlierOne(Editions[Any]):
    def make(
        self, child: int, edition: Edition, made: Any, state: SupervisionState | None
    ) -> tuple[bool, list[Any]]:
        counts, _ = super().make(child, edition, made, state)
        return counts, []


class _GenerationBeforeTerm(KeptSnapshots[Any]):
    def _counts_more(self, number: Number, old: Number) -> bool:
        return (number[2], *number) > (old[2], *old)


class _KeepsItsNumbers(KeptSnapshots[Any]):
    def take_over(self, key: int, term: Term, editions: Sequence[Edition]) -> None:
        pass


class _StartsAlone(Leading):
    def _note_start(self) -> None:
        if self._is_starting and self.state.all_run:
            self._is_starting = False
            self._to_do.append(Started())


class _StartsAlways(Knowledge):
    leading_type = _StartsAlone


class _NeverConsults(Knowledge):
    def _consult(self, first: Keeper, others: list[Present]) -> None:
        pass


class _NeverExchanges(Knowledge):
    def _exchange(self, others: list[Present]) -> None:
        pass


class _NeverRetires(Knowledge):
    def _retire(self) -> None:
        pass


class _AsksOnce(Leading):
    def _after(self, seconds: float, act: Any, *args: Any) -> None:
        if act != self._tell_again:
            super()._after(seconds, act, *args)


class _TellsOnce(Knowledge):
    leading_type = _AsksOnce


class SupervisionBug(StrEnum):
    """Each is found by the simulator."""

    HIGHER_GENERATION_STAYS = "higher-generation-stays"
    GENERATION_IS_AN_EDITION = "generation-is-an-edition"
    DROPS_WHAT_WAS_ASKED_FOR_LATER = "drops-what-was-asked-for-later"
    KEEPS_WHAT_IS_OVER = "keeps-what-is-over"
    MAKES_WHAT_IS_OUTDATED = "makes-what-is-outdated"
    LEAVES_THE_EARLIER_ONE = "leaves-the-earlier-one"
    GENERATION_BEFORE_TERM = "generation-before-term"
    KEEPS_ITS_NUMBERS = "keeps-its-numbers"
    STARTS_ALONE = "starts-alone"
    NEVER_CONSULTS = "never-consults"
    NEVER_EXCHANGES = "never-exchanges"
    NEVER_RETIRES = "never-retires"
    TELLS_ONCE = "tells-once"


_EDITIONS: dict[SupervisionBug | None, type[Editions[Any]]] = {
    SupervisionBug.HIGHER_GENERATION_STAYS: _HigherGenerationStays,
    SupervisionBug.GENERATION_IS_AN_EDITION: _GenerationIsAnEdition,
    SupervisionBug.DROPS_WHAT_WAS_ASKED_FOR_LATER: _DropsWhatWasAskedForLater,
    SupervisionBug.KEEPS_WHAT_IS_OVER: _KeepsWhatIsOver,
    SupervisionBug.MAKES_WHAT_IS_OUTDATED: _MakesWhatIsOutdated,
    SupervisionBug.LEAVES_THE_EARLIER_ONE: _LeavesTheEarlierOne,
}
_SNAPSHOTS: dict[SupervisionBug | None, type[KeptSnapshots[Any]]] = {
    SupervisionBug.GENERATION_BEFORE_TERM: _GenerationBeforeTerm,
    SupervisionBug.KEEPS_ITS_NUMBERS: _KeepsItsNumbers,
}

_KNOWLEDGE: dict[SupervisionBug | None, type[Knowledge]] = {
    SupervisionBug.STARTS_ALONE: _StartsAlways,
    SupervisionBug.NEVER_CONSULTS: _NeverConsults,
    SupervisionBug.NEVER_EXCHANGES: _NeverExchanges,
    SupervisionBug.NEVER_RETIRES: _NeverRetires,
    SupervisionBug.TELLS_ONCE: _TellsOnce,
}


def editions_of(bug: SupervisionBug | None) -> Editions[Any]:
    """Return a worker's objects, with that mistake, or as it ships."""
    return _EDITIONS.get(bug, Editions)()


def snapshots_of(bug: SupervisionBug | None) -> KeptSnapshots[Any]:
    """Return a worker's snapshots, with that mistake, or as it ships."""
    return _SNAPSHOTS.get(bug, KeptSnapshots)()


def knowledge_type_of(bug: SupervisionBug | None) -> type[Knowledge]:
    """Return a worker's machine, with that mistake, or as it ships."""
    return _KNOWLEDGE.get(bug, Knowledge)
