"""The link of a worker to itself: calls to oneself take the same way as any other."""

from __future__ import annotations

import threading
from collections.abc import Callable

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.transport.base import OUTCOMES, Arrived
from farcall.transport.dispatched_link import DispatchedLink, Gate
from farcall.transport.waiter import Waiter
from farcall.wire.frames import Frame
from farcall.wire.messages import KINDS, Request


class LoopbackLink(DispatchedLink):
    """See `base.Link`. Buffers are copied, as on any other link: caller and callee never share."""

    description = "loopback"

    def __init__(self, me: Worker, post: Callable[[Arrived], None]) -> None:
        super().__init__()
        self.peer = me
        self._post = post
        self._lock = threading.Lock()
        self._loss_cause: str | None = None
        self._gate = Gate()  # of requests: answers take the same way

    def set_reading(self, is_on: bool) -> None:
        self._gate.set_open(is_on)
        if self._loss_cause is not None:
            self._gate.set_open(True)

    def send(self, frame: Frame, deadline: float) -> None:
        if type(frame.message) is Request:
            self._gate.pass_by(deadline)
        copies = [bytearray(buffer) for buffer in frame.buffers]
        copy = Frame(frame.message, frame.call_id, frame.body, copies)
        with self._lock:
            if self._loss_cause is not None:
                raise LinkError(self._loss_cause)
            waiter = None
            if KINDS[type(frame.message)] in OUTCOMES:
                waiter = self.waiters.pop(frame.call_id, None)
        if waiter is None:
            self._post(Arrived(self, copy))
        else:
            waiter.deliver(copy)

    def expect(self, call_id: int, waiter: Waiter[Frame]) -> None:
        with self._lock:
            if self._loss_cause is not None:
                raise LinkError(self._loss_cause)
            self.waiters[call_id] = waiter

    def fail(self, cause: str) -> None:
        with self._lock:
            self._loss_cause = cause
            self._gate.set_open(True)
            waiters = self.take_waiters()
        for waiter in waiters:
            waiter.fail(cause)
