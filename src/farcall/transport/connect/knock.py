"""The first bytes of a dialler over TCP where there is a secret, which cost an acceptor one HMAC.

TLS costs it a hundred times as much, which a flood of strangers must not get it to spend. A knock
is no proof: an observer on its path may repeat it, and has gained a handshake of TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

MAGIC = b"far"  # neither TLS nor the length of a message begins so
_NONCE = 16
_MAC = hashlib.sha256().digest_size
LENGTH = len(MAGIC) + _NONCE + _MAC


def knock(secret: bytes) -> bytes:
    """Return a knock, which proves that the secret is known. It is another one each time."""
    nonce = secrets.token_bytes(_NONCE)
    return MAGIC + nonce + _mac(secret, nonce)


def is_knock(beginning: bytes) -> bool:
    """Return whether the first bytes of a connection begin a knock, of any maker."""
    return beginning.startswith(MAGIC)


def is_right(secret: bytes, data: bytes) -> bool:
    """Return whether a knock was made with the secret."""
    start = len(MAGIC) + _NONCE
    return hmac.compare_digest(data[start:], _mac(secret, data[len(MAGIC) : start]))


def _mac(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"farcall knock" + nonce, "sha256")
