"""Links whose frames another thread receives, which hands over to whoever waits for an outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from farcall.transport.waiter import Waiter
from farcall.wire.frames import Frame
from farcall.wire.messages import Message


class HandedOver(ABC):
    """What such links have in common: `receive` and `exchange` of `base.Link`.

    Attributes:
        waiters: by call, for whoever receives to take from, and to fail when the link is lost.
    """

    def __init__(self) -> None:
        self.waiters: dict[int, Waiter[Frame]] = {}

    @abstractmethod
    def send(self, frame: Frame, deadline: float) -> None:
        """See `base.Link`."""

    @abstractmethod
    def expect(self, call_id: int, waiter: Waiter[Frame]) -> None:
        """Add to `waiters`. Raises LinkError: the link is lost."""

    def take_waiters(self) -> list[Waiter[Frame]]:
        """Those who wait, for whoever loses the link to fail. Under the lock that guards them."""
        waiters = list(self.waiters.values())
        self.waiters.clear()
        return waiters

    def receive(self, kinds: frozenset[type[Message]], alarm: int, deadline: float) -> None:
        """Another thread does."""
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
