"""Sends frames that no thread waits for and that can't go at once, since their link has to be
dialled first or the peer does not read. A thread for each peer does the waiting, so `rpc_async`,
`remote`, finalizers and control messages return at once whatever the peer does.

`farcall.protocol.outbox` decides what waits, and in which order.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from farcall.log import get_logger
from farcall.protocol.outbox import Outbox
from farcall.runtime.threads.bell import Bell
from farcall.transport.base import NotSent
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.uninterrupted import uninterrupted
from farcall.wire.frames import Frame
from farcall.wire.messages import OnDevice

logger = get_logger("farcall")

AT_ONCE = 0.0  # a deadline: what can't be written without waiting isn't
# Seconds that a sending thread waits for a peer that reads slowly, before it leaves the rest to
# the thread of the box. A healthy peer that is sent much makes room within less.
GRACE = 0.01
# Bytes a second below which a peer counts as one that does not read. A thread waits so long at most
# for one frame; the rest is copied then.
SLOWEST = 100e6
LOOK_AGAIN = 1.0  # seconds between looks at what a bell should have told
OVERHEAD = 512  # bytes that a request takes here beside its arguments, about


class Waiting(Protocol):
    """Something that waits in a box. None of its methods raises."""

    @property
    def size(self) -> int:
        """In bytes; 0 for small items that can't be many."""

    @property
    def is_over(self) -> bool:
        """Return whether it need not be sent any more."""

    def send(self) -> None:
        """Send it. May wait for the peer, until a deadline of its own."""

    def drop(self) -> None:
        """Drop the item, which will not be sent."""


Box = Outbox[Waiting]


class Turn:
    """Waits in a box for a thread that sends by itself when all that came before is sent."""

    size = 0
    is_over = False

    def __init__(self) -> None:
        self._bell = Bell()

    def send(self) -> None:
        self._bell.ring()

    drop = send

    def wait(self, deadline: float) -> None:
        """Wait for it.

        Raises:
            NotSent: the deadline, `time.monotonic()` seconds, passed.
        """
        try:
            while not self._bell.wait(_piece_until(deadline)):
                if time.monotonic() >= deadline:
                    raise NotSent("earlier messages to the peer still wait to be sent")
        finally:
            self.is_over = True


class Outboxes:
    """The boxes of one agent, and the threads that empty them. Thread-safe.

    Args:
        name: of the agent.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards the boxes, and what follows
        self._senders = 0  # boxes that are not idle
        self._bells: list[Bell] = []  # of those who wait for a change
        self._closing = threading.Event()
        # As many as there are peers that don't read.
        self._threads = BriefThreads(f"farcall-send-{name}", sys.maxsize)

    def put(self, box: Box, item: Waiting, deadline: float) -> None:
        """Have something sent after what waits already. Waits itself while there is no room.

        Args:
            deadline: for that wait, `time.monotonic()` seconds.

        Raises:
            NotSent: there was no room by the deadline.
        """
        while True:
            full = self._put(box, item, must=False)
            if full is None:
                return
            if not full.wait(_piece_until(deadline)) and time.monotonic() >= deadline:
                raise NotSent(
                    f"{box.waiting_bytes} bytes are waiting for it to read already, and the option "
                    f"max_in_flight_bytes is {box.most}"
                )

    def put_at_once(self, box: Box, item: Waiting) -> None:
        """Put an item in as `put` does, whether there is room or not."""
        self._put(box, item, must=True)

    def _put(self, box: Box, item: Waiting, *, must: bool) -> Bell | None:
        step = partial(self._try_put, box, item, must=must)
        return uninterrupted(step, f"farcall-put-{self._name}")

    def _try_put(self, box: Box, item: Waiting, *, must: bool) -> Bell | None:
        """Put an item into a box if there is room, or if it must be.

        Returns:
            A bell that rings when there may be room; None if the item was put.
        """
        with self._lock:
            over = box.prune(_is_over)
            full = None
            starts: bool | None = False
            if item.size and not must and not box.has_room(item.size):
                full = self._bell()
            else:
                starts = box.put(item, item.size)
                self._senders += bool(starts)
        _drop(over)
        if starts is None:
            item.drop()
        elif starts and not self._threads.run(partial(self._send_all, box)):
            self.drop(box)  # this worker has shut down
            self._send_all(box)
        return full

    def _send_all(self, box: Box) -> None:
        while True:
            with self._lock:
                item = box.next()
                self._senders -= item is None
                bells, self._bells = self._bells, []
            for bell in bells:
                bell.ring()
            if item is None:
                return
            try:
                item.send()
            except BaseException:
                logger.exception("%s: an internal error while sending", self._name)

    def drop(self, box: Box) -> None:
        """Drop what waits in the box of a peer that is gone, and whatever is put into it later."""
        with self._lock:
            items = box.take_all()
            bells, self._bells = self._bells, []
        for bell in bells:
            bell.ring()
        _drop(items)

    def flush(self, deadline: float) -> None:
        """Wait until nothing waits or is being sent, but no longer than to the deadline."""
        while True:
            with self._lock:
                change = self._bell() if self._senders else None
            left = deadline - time.monotonic()
            if change is None or left <= 0:
                return
            change.wait(left)

    def pause(self, seconds: float) -> None:
        """Pause a sender that tries again, but not beyond `close`."""
        self._closing.wait(seconds)

    def _bell(self) -> Bell:
        bell = Bell()
        self._bells.append(bell)
        return bell

    def close(self, seconds: float) -> None:
        """Wait for the threads, whose peers are all lost, but no longer than this."""
        self._closing.set()
        self._threads.close(seconds)


def detached(frame: Frame) -> Frame:
    """Return a frame that needs nothing of the sender's memory, for when it is sent later.

    Buffers in the memory of a device stay there.
    """
    buffers = [one if isinstance(one, OnDevice) else bytes(one) for one in frame.buffers]
    return Frame(frame.message, frame.call_id, frame.body, buffers)


def size_of(frame: Frame) -> int:
    """Return how many bytes a frame takes here while it waits, about."""
    return OVERHEAD + len(frame.body) + sum(len(buffer) for buffer in frame.buffers)


def end_of_grace(frame: Frame, deadline: float) -> float:
    """Return when a thread that sends a frame has waited long enough for a slow reader.

    Args:
        deadline: when the frame need not be sent any more; both on `time.monotonic()`, in seconds.
    """
    size = len(frame.body)
    for buffer in frame.buffers:
        size += len(buffer)
    grace = time.monotonic() + GRACE + size / SLOWEST
    return grace if grace < deadline else deadline


def _is_over(item: Waiting) -> bool:
    return item.is_over


def _drop(items: Sequence[Waiting]) -> None:
    for item in items:
        item.drop()


def _piece_until(deadline: float) -> float:
    return max(0.0, min(deadline - time.monotonic(), LOOK_AGAIN))
