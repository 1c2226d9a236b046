"""The end of a backward pass, which its root knows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from farcall.errors import Cancelled
from farcall.runtime.context import waiting
from farcall.serde import StoredError
from farcall.transport.waiter import Alarm, Waiter


class Dropped(NamedTuple):
    """The reason why a pass was stopped at a worker, in place of the exception.

    Every pass at a worker that did not begin it ends so. An exception takes longer to make, and
    most often it is not asked for.
    """

    why: str

    def error(self) -> Cancelled:
        """Return the exception."""
        return Cancelled(self.why)


class Ending:
    """The end of a pass, as the worker that began it hears of it. Thread-safe.

    Attributes:
        is_over: whether the pass is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiter: Waiter[None] = Waiter()
        self.is_over = False
        self._error: StoredError | Dropped | None = None
        self._alarm: Alarm | None = None
        self._receiver = 0  # the thread that the alarm would wake

    def end(self, error: StoredError | Dropped | None) -> None:
        """End the pass; with an error, if there is one."""
        with self._lock:
            if not self.is_over:
                self._error = error  # before the other, which is read without the lock
                self.is_over = True
                self._waiter.deliver(None)
            if self._alarm is not None and self._receiver != threading.get_ident():
                self._alarm.ring()

    def wake_by(self, alarm: Alarm | None) -> None:
        """Set the way to wake the calling thread if another one ends the pass from now on."""
        with self._lock:
            self._alarm = alarm
            self._receiver = threading.get_ident()

    def wait(self, deadline: float) -> None:
        """Wait until the pass is over; raises what it failed with. A handler leaves its place.

        Args:
            deadline: `time.monotonic()` seconds.

        Raises:
            TimeoutError: it is not over by the deadline.
        """
        if not self.is_over:
            with waiting():
                self._waiter.wait(deadline)
        if self._error is not None:
            raise self._error.error()


def unused(idle: Mapping[str, int]) -> RuntimeError:
    """Return the error of fast mode when workers sent tensors that were not used."""
    where = ", ".join(f"{count} by worker {name!r}" for name, count in idle.items())
    return RuntimeError(
        'mode="fast" is for roots that depend on all tensors requiring grad that were sent in the '
        f"context; of these messages nothing is used: {where}. The gradients are incomplete; use "
        'mode="smart"'
    )
