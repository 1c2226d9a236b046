"""Work that is done later, or by another thread: one, which is there while there is any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from farcall.runtime.status import Status
from farcall.transport.brief_threads import BriefThreads

Work = Callable[[], object]


class DelayedWork:
    """Does what it is given, one after the other. Thread-safe.

    Work that is posted without a delay is done in the order of `post`. It should not wait. Its
    errors are logged. Nothing is done once the agent is shut down.

    Args:
        status: of the agent.
        enter: called in each thread, before the work.
    """

    def __init__(self, status: Status, enter: Callable[[], None]) -> None:
        self._status = status
        self._enter = enter
        self._changed = threading.Condition()  # guards what follows
        self._work: list[tuple[float, int, Work]] = []  # a heap
        self._numbers = count()
        self._is_running = False
        self._threads = BriefThreads(f"farcall-later-{status.me.name}", 1)

    def post(self, work: Work, delay: float = 0.0) -> None:
        """Have work done.

        Args:
            delay: seconds until then.
        """
        with self._changed:
            if self._status.is_closed:
                return
            heappush(self._work, (time.monotonic() + delay, next(self._numbers), work))
            self._changed.notify_all()
            begins, self._is_running = not self._is_running, True
        if begins and not self._threads.run(self._run, needed=False):
            self._is_running = False  # the system has no thread; the next work tries again

    def _run(self) -> None:
        self._enter()
        while (work := self._next()) is not None:
            self._threads.do(work)

    def _next(self) -> Work | None:
        with self._changed:
            while self._work and not self._status.is_closed:
                wait = self._work[0][0] - time.monotonic()
                if wait <= 0:
                    return heappop(self._work)[2]
                self._changed.wait(min(wait, threading.TIMEOUT_MAX))
            self._work.clear()
            self._is_running = False
            return None

    def close(self) -> None:
        """End the thread: the agent has shut down."""
        with self._changed:
            self._changed.notify_all()
        self._threads.close(0)
