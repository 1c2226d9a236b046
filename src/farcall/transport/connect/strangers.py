"""Log lines about strangers, of which there may be any number: a few a minute, then a count."""

from __future__ import annotations

import logging
import threading
import time

LINES = 10
SECONDS = 60.0


class StrangerLog:
    """Logs at most `LINES` lines in `SECONDS`, and how many it left out. Thread-safe.

    Args:
        logger: where to.
        name: of this worker.
    """

    def __init__(self, logger: logging.Logger, name: str) -> None:
        self._logger = logger
        self._name = name
        self._lock = threading.Lock()
        self._began = -SECONDS
        self._lines = 0
        self._left_out = 0

    def log(self, level: int, message: str, *args: object) -> None:
        """Log a message, as `Logger.log` does, behind the name of this worker."""
        if not self._logger.isEnabledFor(level):
            return
        now = time.monotonic()
        left_out = 0
        with self._lock:
            if now - self._began >= SECONDS:
                left_out, self._left_out = self._left_out, 0
                self._began, self._lines = now, 0
            self._lines += 1
            if self._lines > LINES:
                self._left_out += 1
                return
            is_last = self._lines == LINES
        if left_out:
            self._logger.log(level, "%s: %d more lines of this kind left out", self._name, left_out)
        self._logger.log(level, f"%s: {message}", self._name, *args)
        if is_last:
            self._logger.log(
                level, "%s: more lines of this kind are counted for a minute", self._name
            )
