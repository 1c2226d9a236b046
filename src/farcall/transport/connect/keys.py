"""Keys that are made of secrets: those of one connection, and whatever else is made of one."""

from __future__ import annotations

import hmac
from typing import NamedTuple

KEY_LENGTH = 32
_HASH = "sha256"
_HASH_LENGTH = 32


def hkdf(secret: bytes, length: int, *, info: bytes, salt: bytes = b"") -> bytes:
    """Return a key that is made of a secret by HKDF-SHA256 of RFC 5869.

    Every worker needs one at its start, and `cryptography` would take longer to import, and to be
    used for the first time, than the rest of the start.

    Args:
        secret: known to no other party; the RFC's input keying material.
        length: in bytes, up to 8160.
        info: what the key is for.
        salt: random or not, secret or not; the empty one is as good as none.
    """
    made, block = b"", b""
    extracted = hmac.digest(salt, secret, _HASH)
    for number in range(1, -(-length // _HASH_LENGTH) + 1):
        block = hmac.digest(extracted, block + info + bytes([number]), _HASH)
        made += block
    return made[:length]


class Keys(NamedTuple):
    """The keys that a handshake over TLS leaves to the connection; see docs/protocol.md.

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
        hkdf(shares, KEY_LENGTH, info=b"farcall records, " + way, salt=salt)
        for way in (b"connector to acceptor", b"acceptor to connector")
    )
    return Keys(sending, receiving, encrypts)
