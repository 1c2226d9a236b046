"""The threads of an executor: started, woken, and sent to rest, within their ceiling."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from farcall.log import get_logger
from farcall.threads import FarcallThread

logger = get_logger("farcall")

SPARE_THREADS = 4
FIRST_THREADS = 3
SPARE_SECONDS = 10.0
RETRY_SECONDS = 0.1  # after the system gave no thread
WARN_SECONDS = 60.0  # between two lines in the log about that


class Followers:
    """Threads that look for work.

    The executor holds its lock around every method but `sleep` and `say_refused`.

    Args:
        name: of the worker.
        run: what each thread runs; it has to call `ended` last.
        lock: the executor's.
        most: how many threads there may be.

    Attributes:
        threads: those that were started and have not ended.
        resting: a bell for each thread that has nothing to do.
        waking: how many were woken, or started, and have not looked for work since.
        refused: why the system gave no thread when it was last asked in vain.
        refused_at: when that was, `time.monotonic()` seconds.
    """

    def __init__(self, name: str, run: Callable[[], None], lock: threading.Lock, most: int) -> None:
        self._name = name
        self._run = run
        self._lock = lock
        self._most = most
        self.threads: set[FarcallThread] = set()
        self.resting: list[threading.Lock] = []
        self.waking = 0
        self.refused = ""
        self.refused_at = -math.inf
        self._warned_at = -math.inf
        self._has_warning = False  # that is not in the log yet
        self._started = 0
        self._stopping = False

    def stop(self) -> list[FarcallThread]:
        """Start no more threads, and wake all. The threads that there are, for joining."""
        self._stopping = True
        while self.resting:
            self.resting.pop().release()
        return list(self.threads)

    def find(self) -> bool:
        """Have a thread look for work: wake one that rests, or start one.

        Returns:
            Whether there is one. If not, the thread that ends a function next looks for work.
        """
        return self.wake() or self.start()

    def wake(self) -> bool:
        """Wake a thread that rests; return False if there is none."""
        if not self.resting:
            return False
        self.resting.pop().release()
        self.waking += 1
        return True

    def start_first(self) -> bool:
        """Start the threads that every executor needs; return False if the system gives fewer."""
        return all(self.start() for _ in range(min(FIRST_THREADS, self._most)))

    def has_spare(self) -> bool:
        """Return whether there is an idle thread; start one if there may be."""
        return bool(self.resting) or self.waking > 0 or self.start()

    def has_reserve(self) -> bool:
        """Return whether there is one more besides, if there may be.

        Calls that no function makes need that: else, where the system gives no more threads, the
        calls that functions wait for would find none.
        """
        if len(self.resting) + self.waking < 2 and self.has_spare():
            return len(self.resting) + self.waking > 1 or self.start() or self.is_full
        return len(self.resting) + self.waking > 1

    @property
    def is_full(self) -> bool:
        """Return whether there are as many threads as there may be."""
        return len(self.threads) >= self._most

    def start(self, *, beyond: bool = False) -> bool:
        """Start a thread, if there may be one more and the system has it.

        Args:
            beyond: also if there are as many as there may be.
        """
        if self._stopping or (len(self.threads) >= self._most and not beyond):
            return False
        now = time.monotonic()
        if now < self.refused_at + RETRY_SECONDS:
            return False
        self._started += 1
        thread = FarcallThread(self._run, f"farcall-{self._name}-{self._started}")
        self.threads.add(thread)
        refused = thread.try_start()
        if refused is None:
            self.waking += 1
            return True
        self.threads.discard(thread)
        if now > self._warned_at + WARN_SECONDS:
            self._warned_at = now
            self._has_warning = True
        self.refused, self.refused_at = refused, now
        return False

    def say_refused(self) -> None:
        """Warn if the system gave no thread. Without the lock: a handler may need these threads."""
        if self._has_warning:
            self._has_warning = False
            logger.warning(
                "%s: the system gives no more than %d threads: %s; calls wait for these",
                self._name,
                len(self.threads),
                self.refused,
            )

    def ended(self, *, woken: bool) -> None:
        """Note that the calling thread ends; `woken` says that it did not look for work before."""
        self.waking -= woken
        self.threads.discard(threading.current_thread())

    def bell(self) -> threading.Lock | None:
        """Return a bell for the calling thread to `sleep` with, or None if enough threads rest."""
        if len(self.resting) >= SPARE_THREADS:
            return None
        bell = threading.Lock()
        bell.acquire()
        self.resting.append(bell)
        return bell

    def sleep(self, bell: threading.Lock) -> bool:
        """Sleep until there is work; return False if there was none for `SPARE_SECONDS`."""
        if bell.acquire(timeout=SPARE_SECONDS):
            return True
        with self._lock:
            if bell not in self.resting:
                return True  # it rang after all, just now
            if len(self.resting) > 2:
                self.resting.remove(bell)
                return False
        bell.acquire()  # two stay, see `has_reserve`
        return True
