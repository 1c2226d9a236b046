"""Frames over sockets, in pure Python. TCP runs everywhere; where there are keys, in records.

How connections come about is in `connections.py`; here frames move. Dead hosts are noticed by TCP
keepalive, which the kernel answers even while a peer's GIL is held; dead processes by their
closed connections, at once.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from functools import partial

from farcall.ids import Worker
from farcall.transport.base import Arrived, Event, Link, LinkLost, Means
from farcall.transport.connect.addresses import PATHS
from farcall.transport.connect.connection import Connection
from farcall.transport.connect.connections import Connections
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening
from farcall.transport.sockets.link import SocketLink
from farcall.transport.sockets.poller import READ, WRITE, new_poller
from farcall.transport.spin import SpinBudget, Spinner
from farcall.transport.watch import PollingWatch
from farcall.wire.frames import DEFAULT_LIMITS, Frame, Limits

MAX_UNREAD_EVENTS = 256
MAX_UNREAD_BYTES = 4 << 20


class SocketEndpoint:
    """See `base.Endpoint`.

    Args:
        me: what to say of ourselves in handshakes.
        listening: where to listen, and how to reach others; the path "shm" says nothing here.
        limits: what a peer may make us allocate.

    Raises:
        LinkError: the address can't be listened on.
    """

    def __init__(self, me: Identity, listening: Listening, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._poller = new_poller()
        self._spin = SpinBudget()
        self._spinner = Spinner(self._spin)
        self._events: deque[Event] = deque()
        self._woken = False
        self._receiver = 0  # the thread inside `next`; others have to wake it
        self._lock = threading.Lock()  # guards `_lost_links`
        self._lost_links: list[SocketLink] = []  # their sockets are still to be closed
        paths = [path for path in PATHS if path in listening.paths and path != "shm"]
        self.means = Means("socket", tuple(paths), listening.protection)
        self._connections = Connections(me, replace(listening, paths=paths), self._open_link)
        self._connections.start()

    @property
    def me(self) -> Identity:
        """Replaced once if the id is assigned after the endpoint listens."""
        return self._connections.me

    @me.setter
    def me(self, me: Identity) -> None:
        self._connections.me = me

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._connections.addresses

    def connect(self, worker: Worker, deadline: float) -> SocketLink:
        return self._connections.connect(worker, deadline)

    def linked(self, worker: Worker) -> SocketLink | None:
        return self._connections.linked(worker)

    def is_gone(self, worker: Worker, deadline: float) -> bool:
        return self._connections.is_gone(worker, deadline)

    def answers(self, worker: Worker, deadline: float) -> bool:
        return self._connections.answers(worker, deadline)

    def _open_link(self, connection: Connection) -> SocketLink:
        return SocketLink(
            connection.sock,
            connection.worker,
            connection.description,
            self._poller,
            self._spin,
            self._limits,
            self._on_frame,
            self._on_link_lost,
            self._is_behind,
            connection.keys,
        )

    # Events.

    def _on_frame(self, link: SocketLink, frame: Frame) -> None:
        self._put(Arrived(link, frame))

    def _is_behind(self) -> bool:
        """Return whether so much waits for `next` that callers should read no more for it."""
        events = list(self._events)  # in one step: others append to it
        if len(events) >= MAX_UNREAD_EVENTS:
            return True
        return sum(_size(event) for event in events) >= MAX_UNREAD_BYTES

    def _on_link_lost(self, link: SocketLink, cause: str) -> None:
        self._connections.removed(link)
        with self._lock:
            self._lost_links.append(link)
        self._put(LinkLost(link, cause))

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if self._receiver not in (0, threading.get_ident()):
            self._poller.wake()

    def next(self, timeout: float | None) -> Event | None:
        # Set before the events are looked at: a thread that appends later sees it, and wakes us.
        self._receiver = threading.get_ident()
        self._poller.is_served = True
        try:
            if self._events:
                return self._events.popleft()
            return None if self._woken else self._receive(timeout)
        finally:
            self._receiver = 0
            self._woken = False  # the caller looks at everything before it calls again

    def poll(self) -> Event | None:
        return self._events.popleft() if self._events else None

    def _receive(self, timeout: float | None) -> Event | None:
        if self._lost_links:
            self._free_lost_links()
        poller = self._poller
        if timeout == 0.0:
            ready = poller.wait(0.0)
        else:
            ready = self._spinner.wait(partial(poller.wait, 0.0), partial(poller.wait, timeout))
        for link, events in ready:
            if link is None:
                continue  # woken up
            if events & WRITE:
                link.write_residue()
            if events & ~(READ | WRITE):  # the peer is gone: what it has left is little
                link.set_reading(True)
            link.service()
        return self._events.popleft() if self._events else None

    def _free_lost_links(self) -> None:
        with self._lock:
            lost, self._lost_links = self._lost_links, []
        busy = [link for link in lost if not link.free()]
        with self._lock:
            self._lost_links += busy

    def new_watch(self) -> PollingWatch:
        return PollingWatch()

    def wake(self) -> None:
        self._woken = True
        if self._receiver:
            self._poller.wake()

    # Ending.

    def links(self) -> list[Link]:
        return list[Link](self._connections.links())

    def drop(self, peer: int, cause: str) -> None:
        for link in self._connections.of_peer(peer):
            link.fail(cause)
        self._connections.on_peer_lost(peer)

    def close(self) -> None:
        if not self._connections.close():
            return
        for link in self._connections.links():
            link.fail("this worker has shut down")
        self._free_lost_links()
        self._poller.wake()
        self._events.clear()
        self._poller.close()

    def close_after_fork(self) -> None:
        for link in self._connections.close_after_fork():
            link.close_after_fork()
        self._poller.close()


def _size(event: Event) -> int:
    """Return how many bytes arrived with an event."""
    if not isinstance(event, Arrived):
        return 0
    frame = event.frame
    return len(frame.body) + sum(len(buffer) for buffer in frame.buffers)
