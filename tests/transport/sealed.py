"""The compiled transport with keys that the tests know, whatever the handshakes leave."""

from __future__ import annotations

import socket
from typing import Any

from farcall.transport.connect.connection import Connection
from farcall.transport.connect.keys import KEY_LENGTH, Keys
from farcall.transport.native.endpoint import NativeEndpoint
from farcall.transport.native.link import NativeLink

DIALLER, ACCEPTOR = (bytes([number]) * KEY_LENGTH for number in (1, 2))


def keys_of(dialled: bool, encrypts: bool = True) -> Keys:
    """Return the keys of one side of a connection; the two sides have each other's."""
    mine, theirs = (DIALLER, ACCEPTOR) if dialled else (ACCEPTOR, DIALLER)
    return Keys(mine, theirs, encrypts)


class SealedLink(NativeLink):
    """Joins connections with keys. Only the side that dialled a link knows how to dial more."""

    __slots__ = ()

    def join(self, sock: socket.socket, keys: Keys | None = None) -> None:
        super().join(sock, keys_of(self.target is not None))


class SealedEndpoint(NativeEndpoint):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections._join = SealedLink.join  # type: ignore[assignment]

    def _open_link(self, connection: Connection) -> NativeLink:
        link = super()._open_link(connection._replace(keys=keys_of(connection.dialled)))
        link.__class__ = SealedLink
        return link
