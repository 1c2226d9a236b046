"""The due calls, among tens of thousands of calls in flight.

Nothing is done for a single call, so one that ends in time costs nothing. Only one time is kept,
before which no call can be due. Then all open calls are looked at, but not sooner again than after
`PAUSE`, nor than after `SHARE` times as long as the look took.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

PAUSE = 0.01  # seconds
SHARE = 10  # so at most a tenth of the time goes into looking


class Call(Protocol):
    """A call with a deadline."""

    @property
    def deadline(self) -> float:
        """`time.monotonic()` seconds."""


C = TypeVar("C", bound=Call)


class Deadlines(Generic[C]):
    """The deadlines of open calls, in `time.monotonic()` seconds. Thread-safe.

    Args:
        open_calls: gives the calls that are open and have not been due yet.
    """

    def __init__(self, open_calls: Callable[[], Iterable[C]]) -> None:
        self._open_calls = open_calls
        self._lock = threading.Lock()
        self.next = math.inf  # when `due` has to be called next

    def note(self, deadline: float) -> bool:
        """Note an open call; return True if the thread that sleeps until `next` must be woken."""
        if deadline >= self.next:
            return False
        with self._lock:
            self.next = min(self.next, deadline)
        return True

    def due(self, now: float) -> list[C]:
        """Return the open calls whose deadline has passed, if it is time to look for them."""
        if now < self.next:
            return []
        with self._lock:
            self.next = math.inf  # `note` sets it for a call that is not looked at here
        start = time.perf_counter()
        due: list[C] = []
        following = math.inf
        for call in self._open_calls():
            deadline = call.deadline
            if deadline <= now:
                due.append(call)
            elif deadline < following:
                following = deadline
        if following < math.inf:
            pause = max(PAUSE, SHARE * (time.perf_counter() - start))
            with self._lock:
                self.next = min(self.next, max(following, now + pause))
        return due
