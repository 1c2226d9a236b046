"""The turns of functions: which may have a thread next, and why some may have none."""

from __future__ import annotations

import time
from collections.abc import Hashable

from farcall.runtime.threads.followers import Followers
from farcall.runtime.threads.function_queue import Function, FunctionQueue
from farcall.runtime.threads.places import Places

RECENTLY = 5.0  # seconds for which a shortage of threads is told of


class Turns:
    """Joins the places, the queue and the threads of an executor.

    The executor holds its lock around every method but `shortage`.

    Args:
        max_threads: how many threads there may be, for messages.
    """

    def __init__(
        self, queue: FunctionQueue, places: Places, followers: Followers, max_threads: int
    ) -> None:
        self._queue = queue
        self._places = places
        self._followers = followers
        self._max_threads = max_threads

    def is_any(self) -> bool:
        """Return whether there is a place for one of the functions that are queued."""
        places = self._places
        return places.is_any_free and self._queue.has_turn(places.refused())

    def may_leader_run(self, depth: int) -> bool:
        """Return whether the leader may run what has this depth and may wait."""
        followers = self._followers
        if len(followers.resting) > 1 and len(followers.threads) <= self._queue.plenty:
            return True  # there are so few threads that nothing need be counted
        if self._queue.admits(depth, self._places.taken()) and (
            followers.has_reserve() if depth < 2 else followers.has_spare()
        ):
            return True
        self._queue.held_at = time.monotonic()
        return False

    def take(self, *, is_led: bool) -> tuple[Function, int, Hashable] | None:
        """Take a function that may have the calling thread out of the queue.

        Args:
            is_led: whether a thread leads that runs nothing of the user's.

        Returns:
            The function, its depth and its caller; None if there is none.
        """
        followers = self._followers
        has_reserve = (is_led and followers.has_spare()) or followers.has_reserve()
        # At the ceiling the queue itself keeps threads for the calls that functions wait for.
        least = 1 if has_reserve or followers.is_full else 2
        return self._queue.pop(self._places.taken(), least, self._places.refused())

    def shortage(self) -> str:
        """Return, for messages, why functions were lately held back for want of threads.

        Returns:
            "" if none were.
        """
        now = time.monotonic()
        if now < self._followers.refused_at + RECENTLY:
            return f"the system gives it no more than {len(self._followers.threads)} threads"
        if now < self._queue.held_at + RECENTLY:
            return f"its option max_threads ({self._max_threads}) allows no more threads"
        return ""
