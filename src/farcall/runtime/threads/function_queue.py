"""Functions that wait for one of the agent's threads, and which of them may have one.

A function that waits for a call keeps its thread. If functions took all threads, the calls that
they wait for would find none, here or elsewhere, and all would wait until their deadlines. So the
number of threads is divided by *depth*: a call that no remote function makes has depth 1, a call
that a function of depth n makes has depth n + 1.

QUEUE-1  Of `max_threads` threads at least one runs no function: it leads.
QUEUE-2  Functions of depth n or less have at most `limit(n)` threads, and each depth one more than
         the depth before it, until all threads are given out.

So wherever functions wait for each other, the deepest calls find a thread, end, and let those
before them end. That holds for any number of calls at once, up to the depth at which `limit` stops
growing; see docs/threads.md.

One caller may send more than is served. So that it delays the others by little:

QUEUE-3  The callers whose functions are queued take turns; the functions of one caller come in the
         order in which they were queued. Deeper ones that were held back come before all others.
         No function that comes in takes a place that a queued one could have.
QUEUE-4  If `max_running` functions run, and none of them is of a certain caller, one of its own
         may run besides: `guests` of these at most, and none if functions run one at a time.

Only queued calls are kept here; nothing is locked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable

Function = Callable[[], None]

DEFAULT_MAX_THREADS = 256
FEWEST_THREADS = 2
MOST_THREADS = 1 << 16
MOST_RESERVED = 128  # threads that are kept for depths beyond the first
DEEPEST = 1 << 30  # the depth of what the calls of every depth may be waiting for


def max_threads_of(max_threads: int | None, num_worker_threads: int) -> int:
    """Return the ceiling that the options mean; None is the default."""
    return max_threads or max(DEFAULT_MAX_THREADS, 2 * num_worker_threads)


class CallerTurns:
    """Functions of several callers, which take turns. Functions of one caller stay in order."""

    def __init__(self) -> None:
        # In the order of their turns. None is empty.
        self._queues: dict[Hashable, deque[tuple[Function, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def has_turn(self, besides: Collection[Hashable]) -> bool:
        """Return whether there is a function of a caller that is not in `besides`."""
        return any(caller not in besides for caller in self._queues)

    def push(self, caller: Hashable, function: Function, depth: int) -> None:
        """Append a function to those of its caller."""
        queue = self._queues.get(caller)
        if queue is None:
            queue = self._queues[caller] = deque()
        queue.append((function, depth))

    def pop(self, besides: Collection[Hashable] = ()) -> tuple[Hashable, Function, int] | None:
        """Return the first function of the caller whose turn it is, but for those in `besides`."""
        for caller in self._queues:
            if caller not in besides:
                break
        else:
            return None
        queue = self._queues.pop(caller)
        function, depth = queue.popleft()
        if queue:
            self._queues[caller] = queue  # behind the others
        return caller, function, depth


class FunctionQueue:
    """See the module's description. The executor holds its lock around every method.

    Args:
        max_threads: how many threads there may be at most.
        max_running: how many functions may run at once.

    Attributes:
        size: how many functions are queued.
        guests: how many may run beyond `max_running`, see QUEUE-4.
        plenty: while there are no more threads than these, every function may have one.
        held_at: when a function was last held back by QUEUE-2, `time.monotonic()` seconds.
    """

    def __init__(self, max_threads: int, max_running: int) -> None:
        self.size = 0
        self.held_at = 0.0
        self._most = most = max_threads - 1
        self.plenty = max(1, most // 4, most - MOST_RESERVED, min(max_running, most // 2))
        self.guests = 0 if max_running < 2 else max(1, max_running // 4)
        self._fresh = CallerTurns()
        self._held: dict[int, CallerTurns] = {}  # by depth

    def limit(self, depth: int) -> int:
        """Return how many threads the functions of this depth, and of less, may have."""
        return min(self._most, self.plenty + depth - 1)

    def admits(self, depth: int, taken: list[int]) -> bool:
        """Return whether a function of this depth may have a thread.

        Args:
            taken: the depths of the functions that have one.
        """
        if len(taken) < self.plenty:
            return True
        if sum(other <= depth for other in taken) >= self.limit(depth):
            return False
        deeper = sorted(other for other in taken if other > depth)
        others = len(taken) - len(deeper)
        return all(others + i < self.limit(other) for i, other in enumerate(deeper, 1))

    def push(self, function: Function, depth: int, caller: Hashable = None) -> None:
        """Queue a function."""
        self._fresh.push(caller, function, depth)
        self.size += 1

    def has_turn(self, besides: Collection[Hashable]) -> bool:
        """Return whether a function is queued of a caller that is not in `besides`."""
        return any(turns.has_turn(besides) for turns in (self._fresh, *self._held.values()))

    def pop(
        self, taken: list[int], least: int = 1, besides: Collection[Hashable] = ()
    ) -> tuple[Function, int, Hashable] | None:
        """Return the next function that may have a thread, with its depth and its caller.

        That is the deepest of those that were held back; else one of the caller whose turn it is.

        Args:
            taken: the depths of the functions that have one.
            least: those of less depth may have none now.
            besides: callers whose functions may have none now.
        """
        is_short = False
        for depth in sorted(self._held, reverse=True):
            if depth < least or not self.admits(depth, taken):
                is_short = True
                continue
            turns = self._held[depth]
            if (found := turns.pop(besides)) is not None:
                if not turns:
                    del self._held[depth]
                self.size -= 1
                caller, function, _ = found
                return function, depth, caller
        while (found := self._fresh.pop(besides)) is not None:
            caller, function, depth = found
            if depth >= least and self.admits(depth, taken):
                self.size -= 1
                return function, depth, caller
            self._held.setdefault(depth, CallerTurns()).push(caller, function, depth)
            is_short = True
        if is_short:
            self.held_at = time.monotonic()
        return None

    def clear(self) -> None:
        """Drop everything."""
        self._fresh = CallerTurns()
        self._held.clear()
        self.size = 0
