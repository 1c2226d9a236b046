"""A waiter: one thread waits for one value that another thread will have."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from typing import Generic, TypeVar, cast

from farcall.errors import LinkError

HAS_EVENTFD = hasattr(os, "eventfd")
MAX_WAIT = threading.TIMEOUT_MAX

T = TypeVar("T")


class Waiter(Generic[T]):
    """Delivered to or failed once, by any thread; waited for by one. Built on a bare lock, which
    is the cheapest thing in Python that sleeps.
    """

    __slots__ = ("_lock", "_value", "cause", "is_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._value: T | None = None
        self.cause: str | None = None
        self.is_set = False

    def deliver(self, value: T) -> None:
        self._value = value
        self.is_set = True
        self._lock.release()

    def fail(self, cause: str) -> None:
        """End the wait: the link is lost."""
        self.cause = cause
        self.is_set = True
        self._lock.release()

    def wait(self, deadline: float) -> T:
        """Return the delivered object. `deadline` in `time.monotonic()` seconds.

        Raises:
            TimeoutError: the deadline passed.
            LinkError: the link was lost.
        """
        left = MAX_WAIT if deadline == math.inf else deadline - time.monotonic()
        if not self.is_set and not self._lock.acquire(timeout=max(0.0, min(left, MAX_WAIT))):
            raise TimeoutError
        return self.result()

    def result(self) -> T:
        """Return the delivered object; only when `is_set`."""
        if self.cause is not None:
            raise LinkError(self.cause)
        return cast(T, self._value)


class Alarm:
    """A file descriptor that can be read once `ring` was called, by any thread."""

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, ...] = ()
        self.has_rung = False
        if HAS_EVENTFD:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._sockets = socket.socketpair()
            self._fd = self._sockets[0].fileno()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        self.has_rung = True
        if self._sockets:
            with contextlib.suppress(OSError):
                self._sockets[1].send(b"\0")
        else:
            os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Close the bell: no thread may ring any more."""
        if self._sockets:
            for end in self._sockets:
                end.close()
        else:
            os.close(self._fd)
