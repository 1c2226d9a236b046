"""Log lines about strangers, of which there may be any number: one a minute for each origin.

A refused credential has a line of its own: workers of one host have one origin, and the line that
names a wrong secret or certificate must not be left out because another process there was late.
"""

from __future__ import annotations

import logging
import threading
import time

from farcall.errors import AuthenticationFailed

LINES = 10  # of all origins together
SECONDS = 60.0


class StrangerLog:
    """Logs a line for each origin in `SECONDS`, at most `LINES`, and how many it left out.

    Thread-safe.

    Args:
        logger: where to.
        name: of this worker.
    """

    def __init__(self, logger: logging.Logger, name: str) -> None:
        self._logger = logger
        self._name = name
        self._lock = threading.Lock()
        self._began = -SECONDS
        self._told: set[tuple[str, int]] = set()
        self._left_out = 0

    def log_refusal(self, origin: str, level: int, who: str, error: OSError) -> None:
        """Log why a connection came to nothing; see `log`."""
        about = f"credential of {origin}" if isinstance(error, AuthenticationFailed) else origin
        self.log(about, level, "refused a connection from %s: %s", who, error)

    def log(self, origin: str, level: int, message: str, *args: object) -> None:
        """Log a message, as `Logger.log` does, behind the name of this worker.

        Args:
            origin: what it is about: one more line about the same is left out.
            level: of the line; lines of another level are others.
            message: with places for `args`.
        """
        if not self._logger.isEnabledFor(level):
            return
        now = time.monotonic()
        left_out = 0
        with self._lock:
            if now - self._began >= SECONDS:
                left_out, self._left_out = self._left_out, 0
                self._began = now
                self._told.clear()
            if (origin, level) in self._told or len(self._told) >= LINES:
                self._left_out += 1
                return
            self._told.add((origin, level))
        if left_out:
            self._logger.log(level, "%s: %d more lines of this kind left out", self._name, left_out)
        self._logger.log(level, f"%s: {message}", self._name, *args)
