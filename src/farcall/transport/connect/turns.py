"""Turns: how many workers of its own host an endpoint dials at once.

A hundred workers of one host that begin to call each other have 9,900 handshakes to make, on a few
cores. If all begin at once, most of the time goes to switches between their threads, a handshake
takes longer than the accepting side waits for it, and the dialler begins it anew: such a group may
never get through. In turn, each handshake has the processor for itself, and takes milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

AT_ONCE = 2
# As long as the accepting side waits for a proof: a peer that takes longer is stopped, or busy
# otherwise, and should hold up no other.
SECONDS = 5.0
LONGEST_WAIT = 3600.0


class DialTurns:
    """Lets a few callers go on at once, and the others in the order of their arrival. Thread-safe.

    Args:
        at_once: the number of turns at one time.
        seconds: after this time a turn no longer counts, though it goes on.
    """

    def __init__(self, at_once: int = AT_ONCE, seconds: float = SECONDS) -> None:
        self._at_once = at_once
        self._seconds = seconds
        self._lock = threading.Lock()  # guards what follows
        self._begun: dict[threading.Event, float] = {}  # the turns, in order
        self._queue: deque[threading.Event] = deque()
        self._closed = False

    @contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Wait for a turn, and have it for the block.

        Args:
            deadline: on `time.monotonic()`, in seconds. From then on the block runs without a turn.
        """
        me = threading.Event()
        with self._lock:
            self._queue.append(me)
        try:
            while (seconds := self._begin(me, deadline)) is not None:
                me.wait(seconds)
            yield
        finally:
            with self._lock:
                self._begun.pop(me, None)
                if me in self._queue:
                    self._queue.remove(me)
                self._wake_first()

    def _begin(self, me: threading.Event, deadline: float) -> float | None:
        """Begin a turn, or return the seconds to wait before the next attempt."""
        with self._lock:
            me.clear()
            now = time.monotonic()
            is_first = self._queue[0] is me
            until_free = self._until_free(now) if is_first else LONGEST_WAIT
            if self._closed or now >= deadline or until_free <= 0:
                self._queue.remove(me)
                self._begun[me] = now
                self._wake_first()
                return None
            return min(until_free, deadline - now)

    def _until_free(self, now: float) -> float:
        """Return the seconds until a turn is free. Lock held."""
        counted = [begun for begun in self._begun.values() if now < begun + self._seconds]
        if len(counted) < self._at_once:
            return 0.0
        return counted[-self._at_once] + self._seconds - now

    def _wake_first(self) -> None:
        if self._queue:
            self._queue[0].set()

    def close(self) -> None:
        """Let all go on that wait now or will."""
        with self._lock:
            self._closed = True
            for one in self._queue:
                one.set()
