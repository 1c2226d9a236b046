"""The keys of one connection: what its records are sealed and opened with."""

from __future__ import annotations

from typing import NamedTuple

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
