"""The link of a worker to itself: calls to oneself take the same way as any other."""

from __future__ import annotations

import threading
from collections.abc import Callable

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.transport.base import OUTCOMES, Arrived
from farcall.transport.waiter import Waiter
from farcall.wire.frames import Frame
from farcall.wire.messages import KINDS, Message


class LoopbackLink:
    """See `base.Link`. Buffers are copied, as on any other link: caller and callee never share."""

    description = "loopback"

    def __init__(self, me: Worker, post: Callable[[Arrived], None]) -> None:
        self.peer = me
        self._post = post
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._waiters: dict[int, Waiter[Frame]] = {}

    def send(self, frame: Frame, deadline: float) -> None:
        copies = [bytearray(buffer) for buffer in frame.buffers]
        copy = Frame(frame.message, frame.call_id, frame.body, copies)
        with self._lock:
            if self._lost is not None:
                raise LinkError(self._lost)
            waiter = None
            if KINDS[type(frame.message)] in OUTCOMES:
                waiter = self._waiters.pop(frame.call_id, None)
        if waiter is None:
            self._post(Arrived(self, copy))
        else:
            waiter.deliver(copy)

    def receive(self, kinds: frozenset[type[Message]], alarm: int, deadline: float) -> None:
        return None

    def exchange(
        self, frame: Frame, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> Frame:
        waiter: Waiter[Frame] = Waiter()
        with self._lock:
            if self._lost is not None:
                raise LinkError(self._lost)
            self._waiters[frame.call_id] = waiter
        try:
            self.send(frame, deadline)
            if meanwhile is not None:
                meanwhile()
            return waiter.wait(deadline)
        finally:
            self._waiters.pop(frame.call_id, None)

    def lose(self, cause: str) -> None:
        with self._lock:
            self._lost = cause
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for waiter in waiters:
            waiter.fail(cause)
