"""The first bytes of a dialler over TCP where there is a secret, which cost an acceptor one HMAC.

TLS costs it a hundred times as much, which a flood of strangers must not get it to spend. A knock
is no proof: whoever sees one on its path may repeat it, and has gained a handshake of TLS.
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
    """Return a knock of somebody who knows the secret. It is another one each time."""
    nonce = secrets.token_bytes(_NONCE)
    return MAGIC + nonce + _mac(secret, nonce)


def is_knock(beginning: bytes) -> bool:
    """Return whether the first bytes of a connection begin a knock, whoever made it."""
    return beginning.startswith(MAGIC)


def is_right(secret: bytes, data: bytes) -> bool:
    """Return whether a knock was made by somebody who knows the secret."""
    start = len(MAGIC) + _NONCE
    return hmac.compare_digest(data[start:], _mac(secret, data[len(MAGIC) : start]))


def _mac(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"farcall knock" + nonce, "sha256")
