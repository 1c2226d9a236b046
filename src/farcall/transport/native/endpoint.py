"""Frames through the compiled transport, without the GIL: `native/` in the source tree.

Workers of one host talk through rings in shared memory, with a Unix socket beside them that rings
the bell and tells of death; others, and workers without shared memory, over a socket, and over
several if that is TCP and buffers are large. The compiled part knows bytes only: the messages are
encoded and decoded here. How connections come about is in `connections.py`.
"""

from __future__ import annotations

import math

import msgspec

from farcall import _native
from farcall.errors import LinkError
from farcall.transport.base import Arrived, Event, Link, LinkLost, Means, Watch
from farcall.transport.connect import addresses
from farcall.transport.connect.addresses import DEFAULT_STREAMS, PATHS
from farcall.transport.connect.connection import Connection
from farcall.transport.connect.connections import Connections
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening
from farcall.transport.native.link import NativeLink
from farcall.transport.spin import spare_cores
from farcall.wire import frames
from farcall.wire.frames import DEFAULT_LIMITS, Limits
from farcall.wire.messages import KINDS

has_crypto = _native.has_crypto  # without it no link can have keys

_DIALLED, _ACCEPTED = 0, 1
_NUMBERS = {message: int(kind) for message, kind in KINDS.items()}
_LAST_KIND = max(_NUMBERS.values())


class NativeEndpoint:
    """See `base.Endpoint`.

    Args:
        me: what to say of ourselves in handshakes.
        listening: where to listen, and how to reach others.
        limits: what a peer may make us allocate.
        stripe_threshold: bytes; smaller buffers go over the link's first connection alone.
        stripe_chunk: bytes that go over one connection at a time.

    Raises:
        LinkError: the address can't be listened on.
    """

    def __init__(
        self,
        me: Identity,
        listening: Listening,
        limits: Limits = DEFAULT_LIMITS,
        *,
        stripe_threshold: int = 1 << 20,
        stripe_chunk: int = 1 << 20,
    ) -> None:
        self._limits = (*limits, _LAST_KIND)
        self._core = _native.Endpoint(
            spare_cores(),
            listening.shared_memory,
            listening.move_threads,
            listening.keep_awake,
            (*frames.SENDING_LIMITS, _LAST_KIND),
        )
        self._links: dict[int, NativeLink] = {}  # by the id of the core
        paths = tuple(path for path in PATHS if path in listening.paths)
        self.means = Means("native", paths, listening.protection)
        self._shm = "shm" in listening.paths
        self._streams = DEFAULT_STREAMS if listening.streams is None else listening.streams
        self._stripes = (stripe_threshold, stripe_chunk)
        self._connections = Connections(
            self._speaking(me), listening, self._open_link, self._give_up, NativeLink.join
        )
        self.connect = self._connections.connect
        self.linked = self._connections.linked
        self.is_gone = self._connections.is_gone
        self.answers = self._connections.answers
        self._connections.start()

    def _speaking(self, me: Identity) -> Identity:
        shm = _native.SHM_VERSION if self._shm else 0
        return msgspec.structs.replace(me, shm=shm, streams=self._streams)

    @property
    def me(self) -> Identity:
        """Replaced once if the id is assigned after the endpoint listens."""
        return self._connections.me

    @me.setter
    def me(self, me: Identity) -> None:
        self._connections.me = self._speaking(me)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._connections.addresses

    @property
    def shared_memory(self) -> int:
        """Return how many bytes of shared memory its links have created and not given back."""
        return self._core.shared_memory

    def _open_link(self, connection: Connection) -> NativeLink:
        zero_copy = self.me.zero_copy and connection.peer.zero_copy
        core = self._open_core(connection, zero_copy)
        path = connection.description
        if not core.is_stream:
            path = path.replace("unix", "shm", 1)
        # In the table before it starts: `next` may have an event of it at once.
        zero_copy = zero_copy and not core.is_stream
        drawback = self._drawback(connection.peer) if path.startswith("unix") else ""
        link = NativeLink(core, connection.worker, path, zero_copy, connection.target, drawback)
        self._links[link.id] = link
        return link

    def _drawback(self, peer: Identity) -> str:
        """Return why a link over a Unix socket has no shared memory."""
        if not self._shm:
            return "shared memory is not among this worker's paths (option paths)"
        if peer.shm == 0:
            return (
                f"{peer.name} offers no shared memory: it is not among its paths (option paths), "
                "or it runs without the native transport"
            )
        if peer.shm != _native.SHM_VERSION:
            return f"{peer.name} runs another farcall, whose shared memory this one can't use"
        return (
            "one of both workers can create no more shared memory: its option shared_memory, or "
            "the system's memory, is used up"
        )

    def _give_up(self, link: NativeLink) -> None:
        self._links.pop(link.id, None)  # `close` may have been first
        link.fail("this worker has shut down")

    def _open_core(self, connection: Connection, zero_copy: bool) -> _native.Link:
        unix = addresses.is_unix(connection.sock)
        dialled = connection.dialled
        fd = connection.sock.detach()
        try:
            if unix and self._shm and connection.peer.shm == _native.SHM_VERSION:
                side = _DIALLED if dialled else _ACCEPTED
                return self._core.open_rings(fd, self._limits, side, zero_copy, connection.deadline)
            streams, keys = connection.streams, connection.keys
            return self._core.open_stream(fd, self._limits, streams, *self._stripes, dialled, keys)
        except RuntimeError as error:
            raise LinkError(str(error)) from error

    # Events.

    def next(self, timeout: float | None) -> Event | None:
        return self._open(self._core.next(math.inf if timeout is None else timeout))

    def poll(self) -> Event | None:
        return self._open(self._core.poll())

    def _open(self, event: _native.Event | None) -> Event | None:
        if event is None:
            return None
        if len(event) == 6:
            number, kind, call_id, meta, body, buffers = event
            link = self._links[number]
            frame = link.open(kind, call_id, meta, body, buffers)
            return None if frame is None else Arrived(link, frame)
        link = self._links[event[0]]
        if len(event) == 1:
            if link.target is not None:
                self._connections.widen(link, link.target)
            return None
        del self._links[event[0]]
        self._connections.removed(link)
        return LinkLost(link, event[1])

    def new_watch(self) -> Watch:
        return _native.Watch()

    def wake(self) -> None:
        self._core.wake()

    # Ending.

    def links(self) -> list[Link]:
        return [link for link in self._connections.links() if link.loss_cause is None]

    def drop(self, peer: int, cause: str) -> None:
        for link in self._connections.of_peer(peer):
            link.fail(cause)
        self._connections.on_peer_lost(peer)

    def close(self) -> None:
        if not self._connections.close():
            return
        self._core.close()
        for link in self._connections.links():
            self._connections.removed(link)  # references keep a closed agent, not what it mapped
        self._links.clear()

    def close_after_fork(self) -> None:
        self._connections.close_after_fork()
        # By our table: another thread may have been changing that of the core just then.
        for link in self._links.values():
            link.close_after_fork()
        self._core.close_after_fork()
