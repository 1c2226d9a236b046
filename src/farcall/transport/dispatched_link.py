"""Links whose frames another thread receives, which hands outcomes over to waiting threads."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from farcall.transport.base import NotSent
from farcall.transport.waiter import MAX_WAIT, Waiter
from farcall.wire.frames import Frame
from farcall.wire.messages import Message


class DispatchedLink(ABC):
    """The common part of such links: `receive` and `exchange` of `base.Link`.

    Attributes:
        waiters: by call, for the receiver to take from, and to fail when the link is lost.
    """

    drawback = ""

    def __init__(self) -> None:
        self.waiters: dict[int, Waiter[Frame]] = {}

    @abstractmethod
    def send(self, frame: Frame, deadline: float) -> None:
        """See `base.Link`."""

    @abstractmethod
    def expect(self, call_id: int, waiter: Waiter[Frame]) -> None:
        """Add to `waiters`. Raises LinkError: the link is lost."""

    @abstractmethod
    def set_reading(self, is_on: bool) -> None:
        """See `base.Link`."""

    def take_waiters(self) -> list[Waiter[Frame]]:
        """Return all waiters, for the loser of the link to fail. Under the lock of the waiters."""
        waiters = list(self.waiters.values())
        self.waiters.clear()
        return waiters

    def receive(self, kinds: frozenset[type[Message]], alarm: int, deadline: float) -> None:
        """Do nothing: another thread receives."""
        return

    def exchange(
        self, frame: Frame, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> Frame:
        """See `base.Link`."""
        waiter: Waiter[Frame] = Waiter()
        try:
            self.expect(frame.call_id, waiter)
            self.send(frame, deadline)
            if meanwhile is not None:
                meanwhile()
            return waiter.wait(deadline)
        finally:
            self.waiters.pop(frame.call_id, None)


class Gate:
    """Holds up the senders of a link without a reader. Open at first. Thread-safe."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()

    def set_open(self, is_open: bool) -> None:
        """Open or shut it."""
        if is_open:
            self._is_open.set()
        else:
            self._is_open.clear()

    def pass_by(self, deadline: float) -> None:
        """Wait until it is open.

        Args:
            deadline: `time.monotonic()` seconds.

        Raises:
            NotSent: the deadline passed.
        """
        while not self._is_open.is_set():
            left = MAX_WAIT if deadline == math.inf else deadline - time.monotonic()
            if left <= 0 or not self._is_open.wait(min(left, MAX_WAIT)):
                raise NotSent
