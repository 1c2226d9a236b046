"""What makes a worker's words its group's: they are signed with what only the group has.

A `Signer` is the seam for other credentials than a shared secret, such as certificates.
"""

from __future__ import annotations

import hmac
import struct
from typing import Protocol

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from farcall.transport.connect.handshake_messages import Identity

KEY_LENGTH = 32
_LABEL = b"farcall store records"
_MEMBER = b"farcall member 2"
_LENGTH = struct.Struct("<I")


class Signer(Protocol):
    """Signs for a group, and knows what was signed so. Thread-safe."""

    def sign(self, data: bytes) -> bytes:
        """Return a signature of these bytes."""

    def check(self, data: bytes, signature: bytes) -> bool:
        """Return whether a member of the group made that signature of these bytes."""


class SecretSigner:
    """HMAC-SHA256 under a key that is derived from the shared secret, for this purpose alone."""

    def __init__(self, secret: bytes) -> None:
        self._key = HKDF(SHA256(), KEY_LENGTH, salt=None, info=_LABEL).derive(secret)

    def sign(self, data: bytes) -> bytes:
        """See `Signer`."""
        return hmac.digest(self._key, data, "sha256")

    def check(self, data: bytes, signature: bytes) -> bool:
        """See `Signer`."""
        return hmac.compare_digest(self.sign(data), signature)


class Unsigned:
    """Where there is no credential: everybody's words are the group's, if nobody signs them."""

    def sign(self, data: bytes) -> bytes:
        """Return the empty signature."""
        return b""

    def check(self, data: bytes, signature: bytes) -> bool:
        """Return whether there is none: what is signed is of a group that has a credential."""
        return not signature


class Membership:
    """What a worker shows to those that it dials: a signature of who it is in which group.

    Args:
        prefix: of the group at its store.
        signer: of the group.
    """

    def __init__(self, prefix: str, signer: Signer) -> None:
        self._prefix = prefix
        self._signer = signer

    def shown_by(self, me: Identity) -> Identity:
        """Return who this worker is, with its signature."""
        return msgspec.structs.replace(me, membership=self._signer.sign(self._said(me)))

    def vouch(self, peer: Identity) -> str | None:
        """Return why a peer is none of the group, or None; see `Listening`."""
        if self._signer.check(self._said(peer), peer.membership):
            return None
        return "it shows no signed record of this group"

    def _said(self, one: Identity) -> bytes:
        number = one.incarnation.to_bytes(8, "little")
        parts = (self._prefix, one.name, one.role)
        return signed_parts(_MEMBER, *(part.encode() for part in parts), number)


def signer_of(secret: bytes | None) -> Signer:
    """Return what a group with that secret, or none, signs with."""
    return Unsigned() if secret is None else SecretSigner(secret)


def signed_parts(*parts: bytes) -> bytes:
    """Return the bytes that are signed of some parts: no other parts give the same ones."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)
