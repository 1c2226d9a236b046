"""Messages for one process alone: Ray encrypts nothing unless it is told to, and keeps copies.

The receiver makes a key for the exchange of X25519 (RFC 7748) and shows its public half. The sender
makes one, too, of which the public half goes before the message; AES-GCM encrypts that under what
both halves give by HKDF. Both keys serve for one message.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from farcall.transport.connect.keys import KEY_LENGTH, hkdf

_INFO = b"farcall ray, plan of a worker"
_NONCE = bytes(12)  # a key is used once


class Seal:
    """The key by which one process opens a message that others have sealed for it."""

    def __init__(self) -> None:
        self._key = X25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def open(self, sealed: bytes) -> bytes:
        """Return the message.

        Raises:
            InvalidTag: it was sealed for another process, or altered.
        """
        sender, message = sealed[:KEY_LENGTH], sealed[KEY_LENGTH:]
        return _cipher(self._key, sender, sender + self.public).decrypt(_NONCE, message, None)


def seal(message: bytes, receiver: bytes) -> bytes:
    """Return a message as only the process can read it that has shown this public key."""
    key = X25519PrivateKey.generate()
    sender = key.public_key().public_bytes_raw()
    return sender + _cipher(key, receiver, sender + receiver).encrypt(_NONCE, message, None)


def _cipher(own: X25519PrivateKey, other: bytes, both: bytes) -> AESGCM:
    shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    return AESGCM(hkdf(shared, KEY_LENGTH, info=_INFO, salt=both))
