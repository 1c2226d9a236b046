"""A connection whose handshake is done, and the requirements of the link that is made of it."""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol

from farcall.ids import Worker
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.keys import Keys
from farcall.transport.connect.multi_stream import StreamTarget


class KeptLink(Protocol):
    """The part of a link that has to be known to keep it."""

    @property
    def peer(self) -> Worker:
        """The worker at the other end."""

    @property
    def description(self) -> str:
        """The path of the link, for people."""

    @property
    def loss_cause(self) -> str | None:
        """The reason why the link ended, or None while it has not."""

    def fail(self, cause: str) -> None:
        """End the link for this cause."""

    def start(self) -> None:
        """Start to receive. Called once, when the link is in the tables."""


class Connection(NamedTuple):
    """A stream socket that is ours alone, and the peer at its end: the handshake is done.

    Attributes:
        sock: nothing beyond the handshake was read from it. Its timeout may be anything.
        peer: what it said of itself, proven if there is a secret.
        description: which path this is, for people; see `base.Link.description`.
        dialled: by us, not by the peer.
        deadline: for `open_link`, on `time.monotonic()` in seconds.
        streams: how many streams the link may have, this connection included.
        target: if there may be more, and we dialled: how to dial them, for `widen`.
        keys: of its records; None: bytes go over the socket as they are.
    """

    sock: socket.socket
    peer: Identity
    description: str
    dialled: bool
    deadline: float
    streams: int = 1
    target: StreamTarget | None = None
    keys: Keys | None = None

    @property
    def worker(self) -> Worker:
        """The peer as the rest of farcall names it."""
        peer = self.peer
        return Worker(
            peer.name,
            peer.id,
            peer.incarnation,
            peer.addresses,
            peer.host,
            peer.pid,
            main=peer.main,
            strict=peer.strict,
            role=peer.role,
        )
