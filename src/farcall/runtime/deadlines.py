"""Which calls are due, for tens of thousands of calls in flight.

A binary heap of single deadlines would keep every finished call for its whole timeout (60 s by
default). Calls are gathered in slots of 10 ms instead; one that ends is removed from its slot, and
only the slots are ordered.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

SLOTS_PER_SECOND = 100


Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """A thread-safe set of (deadline, key); deadlines are `time.monotonic()` seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[int, set[Key]] = {}
        self._order: list[int] = []
        self._sleeping_until = -math.inf

    def add(self, deadline: float, key: Key) -> bool:
        """Remember a call. True: whoever sleeps by `sleep_until` must be woken, it is too late."""
        if deadline == math.inf:
            return False
        slot = math.ceil(deadline * SLOTS_PER_SECOND)
        with self._lock:
            keys = self._slots.get(slot)
            if keys is None:
                keys = self._slots[slot] = set()
                heapq.heappush(self._order, slot)
            keys.add(key)
            return deadline < self._sleeping_until

    def discard(self, deadline: float, key: Key) -> None:
        """The call ended in time."""
        if deadline == math.inf:
            return
        with self._lock:
            keys = self._slots.get(math.ceil(deadline * SLOTS_PER_SECOND))
            if keys is not None:
                keys.discard(key)

    def due(self, now: float) -> list[Key]:
        """Take out all calls whose deadline has passed, and forget empty slots on the way."""
        taken: list[Key] = []
        if not self._order:  # what is added from now on, `sleep_until` or who adds it sees to
            return taken
        with self._lock:
            while self._order:
                slot = self._order[0]
                keys = self._slots[slot]
                if keys and slot > now * SLOTS_PER_SECOND:
                    break
                heapq.heappop(self._order)
                del self._slots[slot]
                taken += keys
        return taken

    def sleep_until(self, now: float) -> float:
        """When to look next (math.inf: never), noted so that `add` can tell when it is too late.

        Not later than the next deadline. What was said before stays said until it has passed: so
        calls that come and go one after the other need not wake whoever sleeps.
        """
        if not self._order and self._sleeping_until == math.inf:
            return math.inf  # as said before: who adds a call sees that
        with self._lock:
            following = self._order[0] / SLOTS_PER_SECOND if self._order else math.inf
            if not now < self._sleeping_until < following:
                self._sleeping_until = following
            return self._sleeping_until
