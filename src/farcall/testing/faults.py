"""Faults on purpose: messages of a running agent that are lost or late on their way out.

    from farcall.testing.faults import Fault, inject

    inject(agent, [Fault(of_type(Request), delay=1.5), Fault(of_type(Release), losses=3)])

For tests of programs: what does yours do when the owner of a reference answers late? A message is
lost before it is written, as on a link that does not get rid of it in time. Messages after a late
one are late, too: links keep the order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.runtime.agent import Agent
from farcall.runtime.calls.outboxes import detached
from farcall.runtime.membership.peers import Peer
from farcall.transport.base import Link, NotSent
from farcall.wire.frames import Frame
from farcall.wire.messages import Message

Matches = Callable[[Message], bool]
ORDER_SECONDS = 0.005  # between two late messages


def of_type(*types: type[Message]) -> Matches:
    """Matches messages of these types."""
    return lambda message: isinstance(message, types)


@dataclass
class Fault:
    """The fate of some messages.

    Attributes:
        matches: to which ones.
        delay: seconds by which each is late.
        losses: how many of them are lost; those after them are not.
    """

    matches: Matches
    delay: float = 0.0
    losses: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def loses(self) -> bool:
        """Return whether the next one is lost."""
        with self._lock:
            self.losses -= 1
            return self.losses >= 0


def inject(agent: Agent, faults: Sequence[Fault]) -> None:
    """Let these faults happen to what an agent sends from now on, also to itself.

    Outcomes of calls go their own way and are not touched. Call it before the agent sends anything.
    """
    connect, linked = agent.links.connect, agent.links.linked
    wrapped: dict[Link, FaultyLink] = {}

    def connect_badly(peer: Peer, deadline: float) -> Link:
        link = connect(peer, deadline)
        return wrapped.setdefault(link, FaultyLink(link, faults))

    def linked_badly(peer: Peer) -> Link | None:
        link = linked(peer)
        return None if link is None else wrapped.setdefault(link, FaultyLink(link, faults))

    agent.links.connect = connect_badly  # type: ignore[method-assign]
    agent.links.linked = linked_badly  # type: ignore[method-assign]


class FaultyLink:
    """A link that loses and delays frames. Thread-safe."""

    def __init__(self, link: Link, faults: Sequence[Fault]) -> None:
        self._link = link
        self._faults = faults
        self._lock = threading.Lock()
        self._free_at = 0.0  # when all earlier frames are written

    @property
    def peer(self) -> Worker:
        return self._link.peer

    @property
    def description(self) -> str:
        return self._link.description

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, frame: Frame, deadline: float) -> None:
        ready = self._ready_at(frame)
        if ready:
            self._send_at(frame, ready)
        else:
            self._link.send(frame, deadline)

    def exchange(
        self, frame: Frame, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> Frame:
        ready = self._ready_at(frame)
        if ready and ready >= deadline:
            self._send_at(frame, ready)
            _sleep_until(deadline)
            raise TimeoutError
        _sleep_until(ready)
        return self._link.exchange(frame, deadline, meanwhile)

    def _ready_at(self, frame: Frame) -> float:
        """Return when to write it (`time.monotonic()` seconds; 0: now). Raises NotSent if lost."""
        delay = 0.0
        for fault in self._faults:
            if fault.matches(frame.message):
                if fault.loses():
                    raise NotSent("lost on purpose")
                delay = max(delay, fault.delay)
        now = time.monotonic()
        with self._lock:
            if delay == 0 and now >= self._free_at:
                return 0.0
            self._free_at = max(now + delay, self._free_at + ORDER_SECONDS)
            return self._free_at

    def _send_at(self, frame: Frame, ready: float) -> None:
        def send() -> None:
            with contextlib.suppress(LinkError, TimeoutError):  # no thread waits for it
                self._link.send(own, time.monotonic() + 1)

        # The memory of its buffers is the sender's again when we return.
        own = detached(frame)
        timer = threading.Timer(ready - time.monotonic(), send)
        timer.daemon = True
        timer.start()


def _sleep_until(ready: float) -> None:
    left = ready - time.monotonic()
    if left > 0:
        threading.Event().wait(left)
