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

# Seconds for which a thread waits for more work that comes in bursts, as when many workers meet.
REST = 2.0
CLOSE_SECONDS = 10.0  # that work has which is under way when its threads are closed


class _RestingThread:
    """A thread without work, which waits for some. The lock of its `BriefThreads` guards it."""

    __slots__ = ("_bell", "work")

    def __init__(self) -> None:
        self.work: Work | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    def wake(self) -> None:
        """End the wait: with `work`, or else the thread ends. Once."""
        self._bell.release()

    def wait(self, seconds: float) -> None:
        """Wait for `wake`, without the lock of the `BriefThreads`."""
        self._bell.acquire(timeout=seconds)


class BriefThreads:
    """Runs what it is given in threads that end when there is nothing more. Thread-safe.

    Where the system gives no thread, one that is there does the work next; without any, the caller.

    Args:
        name: of the threads.
        most: how many there are at once.
        rest: seconds for which a thread waits for more work before it ends. To wake a thread costs
            a fifth of starting one.
    """

    def __init__(self, name: str, most: int, rest: float = 0.0) -> None:
        self._name = name
        self._most = most
        self._rest = rest
        self._lock = threading.Lock()  # guards what follows
        self._resting: list[_RestingThread] = []  # the last one rests for the shortest time
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
            if self._resting:
                thread = self._resting.pop()
                thread.work = work
                thread.wake()
                return True
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
        thread = FarcallThread(partial(self._work, [work]), f"{self._name}_{self._started}")
        self._threads.add(thread)
        refused = thread.try_start()
        if refused is not None:
            self._threads.discard(thread)
        return refused

    def _work(self, first: list[Work]) -> None:
        work: Work | None = first.pop()
        while work is not None:
            self.do(work)
            work = None  # a thread that rests keeps nothing alive
            work = self._next()

    def _next(self) -> Work | None:
        """Return more work for the calling thread, or None: it has to end.

        Under one hold of the lock a thread finds no work and rests, or leaves the set of threads:
        work that comes later finds it resting, or gone.
        """
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            if not self._rest or self._closed:
                self._threads.discard(threading.current_thread())
                return None
            resting = _RestingThread()
            self._resting.append(resting)
        resting.wait(self._rest)
        with self._lock:
            if resting.work is None:
                if resting in self._resting:
                    self._resting.remove(resting)
                self._threads.discard(threading.current_thread())
            return resting.work

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
            while self._resting:
                self._resting.pop().wake()
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
