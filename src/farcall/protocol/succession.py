"""Decide between several supervisors, and between their objects and snapshots.

`standing` defines terms, editions and states.

SUP-5 (one object) Take an edition whose term is that of the state which counts at a worker, or an
      earlier one. The worker has and makes this edition only if that state has it, whatever its
      generation is. If a worker lacks an edition that should run there, it says so.
SUP-6 (snapshots) Of two snapshots, the one of the later term counts, and within one term the one of
      the later generation. A supervisor that takes over numbers its snapshot anew, in its own term.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from farcall.protocol.standing import Edition, Keeper, Missing, Number, SupervisionState, Term
from farcall.protocol.supervision import Phase

R = TypeVar("R")


def successor(keepers: Iterable[Keeper], there: Iterable[tuple[int, Keeper]]) -> Keeper:
    """Return the worker that is to supervise.

    That is the first keeper that is alive. If none is, it is the worker with the smallest id: those
    that hear of a state from another than its supervisor may be no keepers in it.

    Args:
        there: the workers that are alive, each with its id.
    """
    by_id = sorted(there)
    alive = {keeper for _, keeper in by_id}
    return next((keeper for keeper in keepers if keeper in alive), by_id[0][1])


def edition_now(before: Edition, phase: Phase, generation: int, term: Term) -> Edition:
    """Return the edition that a state has of a child.

    Args:
        before: the one that the state had.
        term: of the supervisor. Objects that it has still to make will be of its term.
    """
    is_settled = phase in (Phase.RUNNING, Phase.ENDED)
    return before if is_settled else Edition(*term, generation)


class Editions(Generic[R]):
    """The objects of one supervision that one worker has, or makes. Not thread-safe."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Edition, R]] = {}
        self._killed: set[tuple[int, Edition]] = set()

    def make(
        self, child: int, edition: Edition, made: R, state: SupervisionState | None
    ) -> tuple[bool, list[R]]:
        """Note that an object is to be made; return whether it counts, and what no longer does.

        Args:
            state: the one that counts here, of the term of the edition or a later one.
        """
        before = self._made.get(child)
        if before is not None and before[0] > edition:
            return False, []
        if state is not None and self._is_outdated(child, edition, state):
            return False, []
        self._made[child] = (edition, made)
        return True, [] if before is None else [before[1]]

    def drop_outdated(self, state: SupervisionState) -> list[R]:
        """Drop what the state that counts does not have; return that."""
        outdated = [
            child
            for child, (edition, _) in self._made.items()
            if self._is_outdated(child, edition, state)
        ]
        return [self._made.pop(child)[1] for child in outdated]

    def killed(self, made: R) -> tuple[int, Edition] | None:
        """Drop what the user has killed; return which child it was, if it was one."""
        found = [(child, one) for child, (one, here) in self._made.items() if here == made]
        for child, _ in found:
            del self._made[child]
        self._killed.update(found)
        return found[0] if found else None

    def missing(self, state: SupervisionState, me: str) -> list[Missing]:
        """Return what runs here as the state that counts has it, and does not.

        A supervisor of an earlier term may have had it dropped.
        """
        if state.is_over:
            return []
        return [
            Missing(n, child.edition, (n, child.edition) in self._killed)
            for n, child in enumerate(state.children)
            if child.is_running
            and child.owner == me
            and (n not in self._made or self._made[n][0] != child.edition)
        ]

    def _is_outdated(self, child: int, edition: Edition, state: SupervisionState) -> bool:
        if state.is_over:
            return True
        standing = state.children[child]
        if edition.term == state.term and edition > standing.edition:
            return False  # it was asked for later
        return edition != standing.edition or standing.has_ended


class KeptSnapshots(Generic[R]):
    """The snapshots that one worker keeps, by supervision and child. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Number, R]] = {}

    def put(self, key: int, child: int, number: Number, state: R) -> R | None:
        """Keep a snapshot, unless there is one that counts more; return the one that is dropped."""
        old = self._kept.get((key, child))
        if old is not None and not self._counts_more(number, old[0]):
            return state
        self._kept[key, child] = (number, state)
        return None if old is None else old[1]

    def get(self, key: int, child: int) -> tuple[Number, R] | None:
        """Return the snapshot of a child that counts, with its number."""
        return self._kept.get((key, child))

    def discard(self, key: int) -> list[R]:
        """Drop all snapshots of a supervision; return them."""
        return [self._kept.pop(at)[1] for at in list(self._kept) if at[0] == key]

    def take_over(self, key: int, term: Term, editions: Sequence[Edition]) -> None:
        """Number the snapshots anew: this worker supervises from now on.

        Args:
            editions: of the children, as they are now.
        """
        for child, edition in enumerate(editions):
            found = self._kept.get((key, child))
            if found is not None:
                self._kept[key, child] = ((*term, edition.generation, 0), found[1])

    def _counts_more(self, number: Number, old: Number) -> bool:
        return number > old
