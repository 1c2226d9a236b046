"""The keys of one connection: what its records are sealed and opened with."""

from __future__ import annotations

from typing import NamedTuple

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_LENGTH = 32


class Keys(NamedTuple):
    """What a handshake over TLS leaves to the connection; see docs/protocol.md.

    Attributes:
        sending: 32 bytes, for the records that this side sends.
        receiving: 32 bytes, for those of the peer.
        encrypts: records are encrypted; else they are authenticated only.
    """

    sending: bytes
    receiving: bytes
    encrypts: bool

    def __repr__(self) -> str:
        return f"Keys(encrypts={self.encrypts})"

    def of_acceptor(self) -> Keys:
        """Return the same keys as the other side of the connection has them."""
        return Keys(self.receiving, self.sending, self.encrypts)


def keys_of(shares: bytes, salt: bytes, *, encrypts: bool) -> Keys:
    """Return the connector's keys of a connection.

    Args:
        shares: of the connector and of the acceptor, one behind the other; both are secret.
        salt: ties the keys to the handshake.
        encrypts: see `Keys`.
    """
    sending, receiving = (
        HKDF(hashes.SHA256(), KEY_LENGTH, salt, b"farcall records, " + way).derive(shares)
        for way in (b"connector to acceptor", b"acceptor to connector")
    )
    return Keys(sending, receiving, encrypts)
