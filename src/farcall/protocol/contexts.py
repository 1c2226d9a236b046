"""Keep the autograd contexts that live at one worker, with their givers and receivers.

A context is made by one worker, its creator, and spreads with the calls made inside it. When a
context ends, the creator tells the workers to which it gave the context, and these tell the workers
to which they gave it. A late call, made by a handler that still runs, must not revive a context
that has ended, so the ids of ended contexts are remembered as dead. Within one life of a creator
the ids only grow, and each release names the id below which all are dead (the `low_watermark`). So
no more ids are remembered than the creator has open contexts. Each id has the number of its
creator's life. So if a worker took over the id of a dead worker, or shares it with another by
mistake, its contexts are never taken for ended contexts of the other.

    state    event                        next     effect
    -------  ---------------------------  -------  ---------------------------------------------
    unseen   create, enter                OPEN
    OPEN     enter, tell                  OPEN     the giver or receiver is remembered
    OPEN     end, released                DEAD     DropContext, Tell those that were told
    OPEN     lost (the creator)           DEAD     as after released: in the creator's place
    OPEN     lost (another giver)         OPEN     Report and TellFailures to the creator, from now
                                                   on a giver, which tells us of the end
    OPEN     lost (a giver; no creator)   DEAD     as after released
    OPEN     held                         OPEN     TellFailures: what the peer may have missed
    DEAD     enter, tell                  DEAD     refused
    DEAD     held                         DEAD     Tell the peer that reports

Invariant (tests cite it):

BWD-4  When a context has ended, or its creator is lost, it is dropped by every living worker that
       had it, once, and never revived.

A failed pass is told along the same links, both ways (BWD-6). Each worker but the creator has a
chain of givers that leads to the creator. Where a death breaks the chain, the worker that lost its
giver takes the creator in the giver's place, and each of the two tells the other about failures
that it may have missed. So all living workers that have the context stay linked by way of the
creator.

A worker that enters a context and finds that its giver is lost calls `on_peer_lost` once more. The
machine is not thread-safe: the owner holds one lock around each method, and carries out the
instructions without the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from farcall.ids import original

T = TypeVar("T")

CREATOR_SHIFT = 48  # as in torch.distributed.autograd: the creator's worker id is on top
NUMBERS = 1 << CREATOR_SHIFT
CREATORS = 1 << 16
LIFE_SHIFT = 24  # above the count is the number of a life; a life that has made as many goes on
LIVES = 1 << CREATOR_SHIFT - LIFE_SHIFT  # in the next one
MOST_LIVES = 8  # of one creator, of which dead contexts are remembered: the last ones


class DropContext(NamedTuple, Generic[T]):
    """The context has ended here: stop its passes, and let go of what it held."""

    context: int
    content: T


class TellEnd(NamedTuple):
    """Tell a peer that the context has ended (RELEASE_CONTEXT)."""

    peer: int
    context: int
    low_watermark: int


class ReportHeld(NamedTuple):
    """Tell the creator of a context that we have it (HOLD_CONTEXT)."""

    peer: int
    context: int


class TellFailures(NamedTuple, Generic[T]):
    """Tell a peer which passes of the context are known to have failed (`abort`)."""

    peer: int
    context: int
    content: T


class _ContextEntry(Generic[T]):
    __slots__ = ("content", "givers", "mine", "parted", "told")

    def __init__(self, content: T, mine: bool) -> None:
        self.content = content
        self.mine = mine
        self.givers: set[int] = set()
        self.told: set[int] = set()
        self.parted: set[int] = set()  # those of both that were lost, as they began


class Contexts(Generic[T]):
    """The contexts of one worker. Peers are named by incarnation.

    Args:
        creator: id of this worker.
        life: a number drawn for this life of it, below `LIVES`.
    """

    def __init__(self, creator: int, life: int) -> None:
        self._base = (creator % CREATORS) << CREATOR_SHIFT
        self._next = life << LIFE_SHIFT
        self._entries: dict[int, _ContextEntry[T]] = {}
        self._dead: dict[int, set[int]] = {}  # by the creator and its life
        self._low_watermarks: dict[int, int] = {}  # likewise

    def __iter__(self) -> Iterator[T]:
        return (entry.content for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def next_id(self) -> int:
        """Return the id of the next context that is made here."""
        # Never 0, which means no context.
        self._next = (self._next + 1) % NUMBERS or 1
        return self._base | self._next

    def create(self, context: int, content: T) -> None:
        """Add a context of this worker, with an id from `next_id`."""
        self._entries[context] = _ContextEntry(content, mine=True)

    def get(self, context: int) -> T | None:
        entry = self._entries.get(context)
        return None if entry is None else entry.content

    def is_dead(self, context: int) -> bool:
        """Return whether the context has ended."""
        if context in self._entries:
            return False
        life = context >> LIFE_SHIFT
        return context < self._low_watermarks.get(life, 0) or context in self._dead.get(life, ())

    def enter(self, context: int, giver: int, content: T) -> T | None:
        """Enter a context that a peer gave us; return its content, or None if it has ended.

        The content is `content` if the context is new here.
        """
        entry = self._entries.get(context)
        if entry is None:
            if self.is_dead(context):
                return None
            entry = self._entries[context] = _ContextEntry(content, mine=False)
        entry.givers.add(giver)
        return entry.content

    def tell(self, context: int, peer: int) -> T | None:
        """Return the content of a context that we give a peer, or None if it has ended.

        A peer that gave it to us is told of the end by others.
        """
        entry = self._entries.get(context)
        if entry is None:
            return None
        if peer not in entry.givers:
            entry.told.add(peer)
        return entry.content

    def has_parted(self, context: int, peer: int) -> bool:
        """Return whether a peer had the context when it was lost: it has dropped it."""
        entry = self._entries.get(context)
        return entry is not None and original(peer) in entry.parted

    def known_to(self, context: int) -> tuple[int, ...]:
        """Return the known peers that have the context: its receivers, and its givers."""
        entry = self._entries.get(context)
        return () if entry is None else tuple(entry.told | entry.givers)

    def end(self, context: int) -> list[DropContext[T] | TellEnd]:
        """End a context of this worker."""
        return self._drop(context, None) if context in self._entries else []

    def released(self, context: int, low_watermark: int) -> list[DropContext[T] | TellEnd]:
        """Hear from a peer that the context has ended."""
        return self._drop(context, low_watermark)

    def held(self, context: int, peer: int) -> list[TellEnd | TellFailures[T]]:
        """Hear from a peer that it has a context of this worker."""
        entry = self._entries.get(context)
        if entry is None:
            return [TellEnd(peer, context, self._low_watermarks.get(context >> LIFE_SHIFT, 0) or 1)]
        entry.told.add(peer)
        return [TellFailures(peer, context, entry.content)]

    def on_peer_lost(
        self, peer: int, id: int, *, is_replaced: bool, living: Callable[[int], int | None]
    ) -> list[DropContext[T] | TellEnd | ReportHeld | TellFailures[T]]:
        """Hear that a peer died.

        Args:
            peer: its incarnation.
            id: its worker id.
            is_replaced: whether a newer worker has that id: contexts of the same creator that the
                dead one did not give us are the newer one's.
            living: the incarnation of the living worker with this id, if there is one.
        """
        given = self._given_by(peer)
        made = self.made_by(id)
        ended = [context for context in made if not is_replaced or context in given]
        todo: list[DropContext[T] | TellEnd | ReportHeld | TellFailures[T]] = []
        for context in ended:
            todo += self._drop(context, low_watermark=1)
        for context in given:
            if context in ended:
                continue
            creator = living(context >> CREATOR_SHIFT)
            todo += self._drop(context, 1) if creator is None else self._link(context, creator)
        return todo

    def _link(self, context: int, creator: int) -> list[ReportHeld | TellFailures[T]]:
        """Put the creator of a context in the place of a giver that was lost."""
        entry = self._entries[context]
        entry.givers.add(creator)
        return [ReportHeld(creator, context), TellFailures(creator, context, entry.content)]

    def _given_by(self, peer: int) -> list[int]:
        """Return the contexts of others that a peer gave us; it has no part in any from now on."""
        given = []
        for number, entry in self._entries.items():
            if peer in entry.told or peer in entry.givers:
                entry.parted.add(original(peer))
            entry.told.discard(peer)
            if peer in entry.givers:
                entry.givers.discard(peer)
                if not entry.mine:
                    given.append(number)
        return given

    def made_by(self, creator: int) -> list[int]:
        """Return the contexts here that a worker with this id made."""
        base = creator % CREATORS
        return [number for number in self._entries if number >> CREATOR_SHIFT == base]

    def close(self) -> list[T]:
        """End everything here."""
        contents = list(self)
        self._entries.clear()
        return contents

    def _begin_life(self, life: int) -> None:
        """Remember dead contexts of a life of a creator, and of no more of its lives than a few."""
        creator = life // LIVES
        earlier = [each for each in self._dead if each // LIVES == creator]
        for each in earlier[: max(0, len(earlier) - MOST_LIVES + 1)]:
            del self._dead[each]
            self._low_watermarks.pop(each, None)
        self._dead[life] = set()

    def _drop(self, context: int, low_watermark: int | None) -> list[DropContext[T] | TellEnd]:
        """Drop a context.

        Args:
            low_watermark: the creator's, below which its contexts have ended; None if this worker
                made the context.
        """
        life = context >> LIFE_SHIFT
        # First: a Ctrl-C after that leaves no entry behind.
        entry = self._entries.pop(context, None)
        if low_watermark is None:
            mine = [number for number, other in self._entries.items() if other.mine]
            low_watermark = min(mine, default=self._base | self._next)
        if life not in self._dead:
            self._begin_life(life)
        dead = self._dead[life]
        dead.add(context)
        if low_watermark > self._low_watermarks.get(life, 0):
            self._low_watermarks[life] = low_watermark
            self._dead[life] = {number for number in dead if number >= low_watermark}
        if entry is None:
            return []
        return [
            DropContext(context, entry.content),
            *(TellEnd(peer, context, low_watermark) for peer in entry.told),
        ]
