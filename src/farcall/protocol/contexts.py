"""Which autograd contexts live at one worker, who gave them to it, and whom it told.

A context is made by one worker, its creator, and spreads with the calls made inside it. When it
ends, the creator tells those it gave the context to, and they tell on. A call that is late, by a
handler that still runs, must not revive a context that has ended: its id is remembered as dead.
Ids of one creator only grow, and each release says below which id all of them are dead (the
`floor`), so the memory is no larger than the number of contexts that the creator has open.

When the creator dies, whoever notices ends the context in its place. When another worker dies,
those whom it gave the context to might not be told of its end: they report to the creator, which
then tells them itself. Not thread-safe: whoever owns it holds one lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

CREATOR_SHIFT = 48  # as in torch.distributed.autograd: the creator's worker id is on top
NUMBERS = 1 << CREATOR_SHIFT
CREATORS = 1 << 16


class Dropped(NamedTuple, Generic[T]):
    """A context that ends here: what it held, and which peers are to be told."""

    content: T
    told: tuple[int, ...]


class _Entry(Generic[T]):
    __slots__ = ("content", "givers", "mine", "told")

    def __init__(self, content: T, mine: bool) -> None:
        self.content = content
        self.mine = mine
        self.givers: set[int] = set()
        self.told: set[int] = set()


class Contexts(Generic[T]):
    """The contexts of one worker. Peers are named by incarnation.

    Args:
        creator: id of this worker.
        first: number of its first context; above all that an earlier life of it used.
    """

    def __init__(self, creator: int, first: int) -> None:
        self._base = (creator % CREATORS) << CREATOR_SHIFT
        self._next = first % NUMBERS
        self._entries: dict[int, _Entry[T]] = {}
        self._dead: dict[int, set[int]] = {}
        self._floors: dict[int, int] = {}

    def __iter__(self) -> Iterator[T]:
        return (entry.content for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def next_id(self) -> int:
        """The id of the next context that is made here."""
        # Never 0, which means no context.
        self._next = (self._next + 1) % NUMBERS or 1
        return self._base | self._next

    def create(self, context: int, content: T) -> None:
        """This worker makes a context, with an id from `next_id`."""
        self._entries[context] = _Entry(content, mine=True)

    def get(self, context: int) -> T | None:
        entry = self._entries.get(context)
        return None if entry is None else entry.content

    def is_dead(self, context: int) -> bool:
        """Whether the context has ended."""
        creator = context >> CREATOR_SHIFT
        if context in self._entries:
            return False
        return context < self._floors.get(creator, 0) or context in self._dead.get(creator, ())

    def enter(self, context: int, giver: int, content: T) -> T | None:
        """A peer gave us a context: what it holds, `content` if it is new. None: it has ended."""
        entry = self._entries.get(context)
        if entry is None:
            if self.is_dead(context):
                return None
            entry = self._entries[context] = _Entry(content, mine=False)
        entry.givers.add(giver)
        return entry.content

    def tell(self, context: int, peer: int) -> T | None:
        """We give a peer a context: what it holds here. None: it has ended.

        A peer that gave it to us is told of the end by others.
        """
        entry = self._entries.get(context)
        if entry is None:
            return None
        if peer not in entry.givers:
            entry.told.add(peer)
        return entry.content

    def known_to(self, context: int) -> tuple[int, ...]:
        """Who has the context as far as we know: whom we gave it to, and who gave it to us."""
        entry = self._entries.get(context)
        return () if entry is None else tuple(entry.told | entry.givers)

    def end(self, context: int) -> tuple[Dropped[T], int] | None:
        """The creator ends its context. Also gives the floor that the others are told."""
        if context not in self._entries:
            return None
        dropped = self._drop(context)
        mine = [number for number, entry in self._entries.items() if entry.mine]
        floor = min(mine, default=self._base | self._next)
        return dropped, self._bury(context, floor)

    def released(self, context: int, floor: int) -> Dropped[T] | None:
        """A peer says that the context has ended. None: there was nothing of it here."""
        self._bury(context, floor)
        return self._drop(context) if context in self._entries else None

    def held(self, context: int, peer: int) -> int:
        """A peer says that it has a context of ours: 0, or the floor to tell it that it ended."""
        entry = self._entries.get(context)
        if entry is not None:
            entry.told.add(peer)
            return 0
        return self._floors.get(context >> CREATOR_SHIFT, 0) or 1

    def lost(self, peer: int) -> list[int]:
        """A peer died: the contexts of others that it gave us."""
        given = []
        for number, entry in self._entries.items():
            entry.told.discard(peer)
            if peer in entry.givers:
                entry.givers.discard(peer)
                if not entry.mine:
                    given.append(number)
        return given

    def made_by(self, creator: int) -> list[int]:
        """The contexts here that a worker with this id made."""
        base = creator % CREATORS
        return [number for number in self._entries if number >> CREATOR_SHIFT == base]

    def close(self) -> list[T]:
        """Everything ends here."""
        contents = list(self)
        self._entries.clear()
        return contents

    def _drop(self, context: int) -> Dropped[T]:
        entry = self._entries.pop(context)
        return Dropped(entry.content, tuple(entry.told))

    def _bury(self, context: int, floor: int) -> int:
        creator = context >> CREATOR_SHIFT
        dead = self._dead.setdefault(creator, set())
        dead.add(context)
        if floor > self._floors.get(creator, 0):
            self._floors[creator] = floor
            self._dead[creator] = {number for number in dead if number >= floor}
        return floor
