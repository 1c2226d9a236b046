"""A watchdog's eye, for transports that are Python: see `base.Watch`."""

from __future__ import annotations

import math
import threading
import time

from farcall.transport.base import Notice

PATIENCE_SECONDS = 0.001
SHORT_PAUSE_SECONDS = 0.001
LONG_PAUSE_SECONDS = 0.004
QUIET_LOOKS = 12
STARVING_LOOKS = 10


class PollingWatch:
    """As `native/core/watch.hpp`, where it is explained, but each look takes the GIL."""

    def __init__(self) -> None:
        self._busy_since = math.inf
        self._has_queue = False
        self._stopped = False
        self._ended = self._seen_ended = self._quiet = 0
        self._pause = SHORT_PAUSE_SECONDS
        self._needed = threading.Event()
        self._sleeps = False

    def begin(self) -> None:
        if self._busy_since == math.inf:
            self._busy_since = time.monotonic()
            if self._sleeps:
                self._needed.set()

    def end(self) -> None:
        self._busy_since = math.inf
        self._ended += 1

    def is_overdue(self) -> bool:
        return time.monotonic() - self._busy_since > PATIENCE_SECONDS

    def set_queue(self, is_there: bool) -> None:
        self._has_queue = is_there
        if is_there and self._sleeps:
            self._needed.set()

    def wait(self) -> int:
        while not self._stopped:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, LONG_PAUSE_SECONDS)
            overdue, has_queue = self.is_overdue(), self._has_queue
            if overdue or has_queue:
                self._pause = SHORT_PAUSE_SECONDS
            self._quiet = self._quiet + 1 if self._ended == self._seen_ended else 0
            self._seen_ended = self._ended
            if overdue:
                return Notice.OVERDUE
            if has_queue and self._quiet % STARVING_LOOKS == STARVING_LOOKS - 1:
                return Notice.STARVING
            if self._quiet >= QUIET_LOOKS:
                self._sleep_until_needed()
                self._quiet, self._pause = 0, SHORT_PAUSE_SECONDS
        return Notice.STOPPED

    def _sleep_until_needed(self) -> None:
        self._needed.clear()
        self._sleeps = True
        # A thread that became busy before the flag was set did not see it: look once more.
        if self._busy_since == math.inf and not self._has_queue and not self._stopped:
            self._needed.wait()
        self._sleeps = False

    def stop(self) -> None:
        self._stopped = True
        self._needed.set()
