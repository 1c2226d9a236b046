"""Queue messages to one peer, by one way to it, so that no caller waits for the network.

Almost all messages go past an idle box. A message that can't be written at once is put into the
box, and the box's sender writes what comes out, in order. A box that is not idle takes all
messages, since a request must not overtake the request that makes a reference which it uses.

    state      event             next       effect
    ---------  ----------------  ---------  -----------------------------------------------------
    IDLE       put               SENDING    a sender has to be started
    SENDING    put               SENDING
    SENDING    next, more waits  SENDING    the first item comes out: the sender sends it
    SENDING    next, none waits  IDLE       the sender ends
    SENDING    prune             SENDING    items that are not needed any more come out
    any        lost              LOST       every item that waits comes out
    LOST       put               LOST       refused
    LOST       next              LOST       the sender ends

Invariants (tests cite them):

OUT-1  There is one sender at most: it is asked for when IDLE is left, and ends when IDLE is back.
OUT-2  An item that was put comes out exactly once: by `next`, `prune` or `take_all`.
OUT-3  Items come out in the order in which they were put.
OUT-4  While the box is IDLE, nothing waits and nothing is being sent: a thread that sends past the
       box then overtakes nothing that was put before.
OUT-5  If `has_room` is asked before each item with bytes is put, the waiting items have at most
       `most` bytes together, or only one of them has bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

PRUNE_FROM = 64  # items


class Outbox(Generic[Item]):
    """One box. The owner holds a lock around everything but a look at `is_idle`.

    Args:
        most: how many bytes may wait.

    Attributes:
        most: the same.
        is_idle: see OUT-4.
        waiting_bytes: of the items that wait.
    """

    __slots__ = ("_is_lost", "_items", "_prune_at", "is_idle", "most", "waiting_bytes")

    def __init__(self, most: int) -> None:
        self.most = most
        self._items: deque[tuple[Item, int]] = deque()
        self._is_lost = False
        self._prune_at = PRUNE_FROM
        self.is_idle = True
        self.waiting_bytes = 0

    def has_room(self, size: int) -> bool:
        """Return whether an item of this many bytes may be put now."""
        return self.waiting_bytes == 0 or self.waiting_bytes + size <= self.most

    def put(self, item: Item, size: int) -> bool | None:
        """Add an item that waits from now on.

        Returns:
            Whether a sender has to be started; None: the peer is lost, and so is the item.
        """
        if self._is_lost:
            return None
        self._items.append((item, size))
        self.waiting_bytes += size
        was_idle, self.is_idle = self.is_idle, False
        return was_idle

    def next(self) -> Item | None:
        """Take out the next item, for the sender.

        Returns:
            None if there is none: the sender must end.
        """
        if not self._items:
            self.is_idle = True
            return None
        item, size = self._items.popleft()
        self.waiting_bytes -= size
        return item

    def prune(self, is_over: Callable[[Item], bool]) -> list[Item]:
        """Take out items that are not needed any more. Looks at them only now and then."""
        if len(self._items) < self._prune_at:
            return []
        kept: deque[tuple[Item, int]] = deque()
        pruned = []
        for item, size in self._items:
            if is_over(item):
                pruned.append(item)
                self.waiting_bytes -= size
            else:
                kept.append((item, size))
        self._items = kept
        self._prune_at = max(PRUNE_FROM, 2 * len(kept))
        return pruned

    def take_all(self) -> list[Item]:
        """Take no more items, and return what waited: the peer is gone."""
        self._is_lost = True
        items = [item for item, _ in self._items]
        self._items.clear()
        self.waiting_bytes = 0
        return items

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._items)
