"""Workers that have nothing but their connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stations import PATIENCE, soon

from farcall.ids import Worker, new_incarnation
from farcall.transport.connect.connection import Connection
from farcall.transport.connect.connections import Connections
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening


class BareLink:
    """A link that carries nothing: its endpoint is the test."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.peer = connection.worker
        self.description = connection.description
        self.loss_cause: str | None = None
        self.started = 0
        connection.sock.settimeout(PATIENCE)

    def start(self) -> None:
        self.started += 1

    def fail(self, cause: str) -> None:
        self.loss_cause = cause


class Side:
    """A worker that has nothing but its connections."""

    def __init__(self, name: str, open_link: Callable[[Connection], BareLink], **options: Any):
        self.given_up: list[BareLink] = []
        self.connections: Connections[BareLink]
        me = Identity(name, len(name), new_incarnation(), "here", f"main of {name}")
        self.connections = Connections(me, Listening(**options), open_link, self.given_up.append)
        addresses = self.connections.addresses
        self.worker = Worker(name, me.id, me.incarnation, addresses, me.host, main=me.main)
        self.connections.start()

    def connect(self, to: Side, deadline: float | None = None) -> BareLink:
        return self.connections.connect(to.worker, soon() if deadline is None else deadline)

    def close(self) -> None:
        self.connections.close()
        for link in self.connections.links():
            link.connection.sock.close()


SideMaker = Callable[..., Side]
