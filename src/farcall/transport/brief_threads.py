"""Threads for work that is soon done, such as handshakes: one each, up to a number."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import Generic, TypeVar

from farcall.log import get_logger
from farcall.threads import FarcallThread

logger = get_logger("farcall.transport")

T = TypeVar("T")
Work = Callable[[], None]

CLOSE_SECONDS = 10.0  # that work has which is under way when its threads are closed


class BriefThreads:
    """Runs what it is given in threads that end when there is nothing more. Thread-safe.

    Where the system gives no thread, one that is there does the work next; without any, the caller.

    Args:
        name: of the threads.
        most: how many there are at once.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()  # guards what follows
        self._queue: deque[Work] = deque()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._closed = False

    def run(self, work: Work, *, needed: bool = True) -> bool:
        """Have work done in the background.

        Args:
            work: it may raise anything, which is logged.
            needed: the caller does it rather than leave it undone.

        Returns:
            Whether it is done, or will be. Not after `close`.
        """
        refused: str | None = None
        is_queued = False
        with self._lock:
            if self._closed:
                return False
            if len(self._threads) < self._most:
                refused = self._start(work)
                if refused is None:
                    return True
            if self._threads:
                self._queue.append(work)
                is_queued = True
        if refused is not None:  # without the lock: a handler of the log may need these threads
            logger.debug("%s: %s", self._name, refused)
        if is_queued:
            return True
        if needed:
            self.do(work)
        return needed

    def _start(self, work: Work) -> str | None:
        """Start a thread with this work; return why the system gives none. Lock held."""
        self._started += 1
        thread = FarcallThread(partial(self._work, work), f"{self._name}_{self._started}")
        self._threads.add(thread)
        refused = thread.try_start()
        if refused is not None:
            self._threads.discard(thread)
        return refused

    def _work(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            self.do(work)
            with self._lock:
                work = self._queue.popleft() if self._queue else None
                if work is None:
                    self._threads.discard(threading.current_thread())

    def do(self, work: Callable[[], object]) -> None:
        """Do work in the caller's thread. Its errors are logged."""
        try:
            work()
        except BaseException:
            logger.exception("%s: an internal error", self._name)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Take no more work, and wait for the end of what there is, but no longer than this.

        Work that has not ended by then is named in the log, unless `seconds` is 0.
        """
        with self._lock:
            self._closed = True
            threads = [one for one in self._threads if one is not threading.current_thread()]
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        left = [thread.name for thread in threads if thread.is_alive()]
        if left and seconds:
            logger.warning("left behind after %g s, still at work: %s", seconds, ", ".join(left))


class Several(Generic[T]):
    """Runs functions at once, each in a thread of its own. For one thread.

    Args:
        name: of the threads.
        functions: begin to run when this is made.
        most: how many run at once.
    """

    def __init__(self, name: str, functions: Sequence[Callable[[], T]], most: int) -> None:
        self._ended: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()
        self._count = len(functions)
        self._threads = BriefThreads(name, most)
        for number, function in enumerate(functions):
            self._threads.run(partial(self._run, number, function))

    def _run(self, number: int, function: Callable[[], T]) -> None:
        try:
            self._ended.put((number, function(), None))
        except BaseException as error:
            self._ended.put((number, None, error))

    def results(self) -> list[T]:
        """Wait for all, and return what each returned, or raise what the first one raised."""
        ended = sorted((self._ended.get() for _ in range(self._count)), key=itemgetter(0))
        self._threads.close()
        for _, _, error in ended:
            if error is not None:
                raise error
        return [result for _, result, _ in ended]  # type: ignore[misc]  # all have one
