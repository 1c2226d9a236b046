"""When a backward pass is over, and how: known at the root."""

from __future__ import annotations

import threading
from typing import NamedTuple

from farcall.errors import Cancelled
from farcall.protocol.backward import Returned
from farcall.runtime.agent import Agent
from farcall.serde import StoredError
from farcall.transport.waiter import Alarm, Waiter


class Dropped(NamedTuple):
    """Why a pass was stopped at a worker, in place of the exception.

    Every pass at a worker that did not begin it ends so. An exception takes longer to make, and
    most often nobody asks for it.
    """

    why: str

    def error(self) -> Cancelled:
        """The exception."""
        return Cancelled(self.why)


class Ending:
    """The end of a pass, as the worker that began it hears of it. Thread-safe.

    Attributes:
        is_over: whether the pass is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned = Returned()
        self._missing: dict[str, int] = {}
        self._waiter: Waiter[None] = Waiter()
        self.is_over = False
        self._error: StoredError | None = None
        self._alarm: Alarm | None = None
        self._receiver = 0  # the thread that the alarm would wake

    def give_back(self, worker: str, share: int, missing: int) -> None:
        """A worker has done its share.

        Args:
            worker: its name.
            share: of the pass; see `protocol.backward`.
            missing: how many of its sources wait for a gradient; of interest in fast mode only.
        """
        with self._lock:
            # The number at a worker only falls, and its last message says the final one.
            self._missing[worker] = min(missing, self._missing.get(worker, missing))
            is_over = self._returned.add(share)
        if is_over:
            idle = {worker: count for worker, count in self._missing.items() if count > 0}
            self._end(unused(idle) if idle else None)

    def fail(self, error: BaseException) -> None:
        """The pass can't go on."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if not self.is_over:
                self._error = (
                    None if error is None else StoredError(error)
                )  # before the other, which is read without the lock
                self.is_over = True
                self._waiter.deliver(None)
            if self._alarm is not None and self._receiver != threading.get_ident():
                self._alarm.ring()

    def wake_by(self, alarm: Alarm | None) -> None:
        """How to wake the calling thread if another one ends the pass from now on."""
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
            with Agent.waiting():
                self._waiter.wait(deadline)
        if self._error is not None:
            raise self._error.error()


def unused(idle: dict[str, int]) -> RuntimeError:
    """In fast mode, of so many messages that workers sent nothing is used."""
    where = ", ".join(f"{count} by worker {name!r}" for name, count in idle.items())
    return RuntimeError(
        'mode="fast" is for roots that depend on all tensors requiring grad that were sent in the '
        f"context; of these messages nothing is used: {where}. The gradients are incomplete; use "
        'mode="smart"'
    )
