"""A one-time event that a thread sleeps for. A signal may end the sleep, and breaks nothing then.

The compiled bell is rung without the GIL, so the thread that it wakes finds the GIL free. With the
lock of `threading` a call and its `Future.wait` take a fifth longer.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING


class LockBell:
    """A bell without the compiled part. Thread-safe. Once rung, it stays rung."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Sleep until the bell rings; handlers of signals run meanwhile.

        Returns:
            False if the time passed first.

        Raises:
            BaseException: what the handler of a signal raised.
        """
        has_rung = self._lock.acquire(timeout=seconds)
        if has_rung:
            self.ring()
        return has_rung


if TYPE_CHECKING:
    from farcall._native import Bell
else:
    try:
        from farcall._native import Bell
    except ImportError:
        Bell = LockBell

__all__ = ["Bell", "LockBell"]
