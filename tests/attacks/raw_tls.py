"""TLS 1.3 (RFC 8446) as an attacker speaks it, at either end: any records, any messages.

One cipher suite and one group, which every library has. Nothing that the peer says is checked.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHANGE_CIPHER_SPEC, ALERT, HANDSHAKE, APPLICATION_DATA = range(20, 24)
CLIENT_HELLO, SERVER_HELLO = 1, 2
ENCRYPTED_EXTENSIONS, CERTIFICATE, CERTIFICATE_VERIFY, FINISHED, KEY_UPDATE = 8, 11, 15, 20, 24

_SUITE = 0x1301  # TLS_AES_128_GCM_SHA256
_X25519 = 0x001D
_KEY_SHARE, _VERSIONS = 51, 43
HEADER = 5
LONGEST = 1 << 14  # bytes of a record's contents


def vector(data: bytes, size: int) -> bytes:
    """Return bytes behind their length, which has so many bytes."""
    return len(data).to_bytes(size, "big") + data


def message(kind: int, body: bytes) -> bytes:
    """Return a message of a handshake."""
    return bytes([kind]) + vector(body, 3)


def record(kind: int, data: bytes) -> bytes:
    """Return a record in plain."""
    return bytes([kind]) + b"\x03\x03" + vector(data, 2)


def in_records(data: bytes, size: int = LONGEST) -> Iterator[bytes]:
    """Give a handshake in plain, with so many bytes in a record."""
    for start in range(0, len(data), size):
        yield record(HANDSHAKE, data[start : start + size])


def _extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + vector(data, 2)


def _share(key: X25519PrivateKey) -> bytes:
    return _X25519.to_bytes(2, "big") + vector(key.public_key().public_bytes_raw(), 2)


def client_hello(
    key: X25519PrivateKey, *, more: Iterable[tuple[int, bytes]] = (), versions: bytes = b"\x03\x04"
) -> bytes:
    """Return a hello with further extensions, for the last of which more than 64 KiB are room."""
    extensions = [
        _extension(10, vector(_X25519.to_bytes(2, "big"), 2)),
        _extension(13, vector(bytes.fromhex("0403080408050806"), 2)),
        _extension(_KEY_SHARE, vector(_share(key), 2)),
        _extension(_VERSIONS, vector(versions, 1)),
        *(_extension(kind, data) for kind, data in more),
    ]
    start = b"\x03\x03" + secrets.token_bytes(32) + vector(b"", 1)
    suites = vector(_SUITE.to_bytes(2, "big") + b"\xc0\x2b", 2) + vector(b"\0", 1)
    return message(CLIENT_HELLO, start + suites + vector(b"".join(extensions), 2))


def server_hello(key: X25519PrivateKey, session: bytes, *, version: bytes = b"\x03\x04") -> bytes:
    """Return the answer to a hello with that session."""
    extensions = _extension(_VERSIONS, version) + _extension(_KEY_SHARE, _share(key))
    start = b"\x03\x03" + secrets.token_bytes(32) + vector(session, 1)
    suite = _SUITE.to_bytes(2, "big") + b"\0"
    return message(SERVER_HELLO, start + suite + vector(extensions, 2))


class Heard(NamedTuple):
    """The parts of a peer's hello that the other side needs."""

    whole: bytes  # the message
    session: bytes
    share: bytes


def hello_in(data: bytes) -> Heard | None:
    """Return the hello that bytes in plain records begin with, or None while it is not there."""
    parts = b"".join(part for kind, part in plain_records(data) if kind == HANDSHAKE)
    if len(parts) < 4 or len(parts) < 4 + int.from_bytes(parts[1:4], "big"):
        return None
    whole = parts[: 4 + int.from_bytes(parts[1:4], "big")]
    at = 4 + 2 + 32
    session, at = _taken(whole, at, 1)
    if whole[0] == CLIENT_HELLO:
        _, at = _taken(whole, at, 2)
        _, at = _taken(whole, at, 1)
    else:
        at += 3
    extensions, _ = _taken(whole, at, 2)
    return Heard(whole, session, _share_in(extensions, in_list=whole[0] == CLIENT_HELLO))


def _taken(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    """Return the vector at a place, and where it ends."""
    start = at + size
    end = start + int.from_bytes(data[at:start], "big")
    return data[start:end], end


def _share_in(extensions: bytes, *, in_list: bool) -> bytes:
    at = 0
    while at < len(extensions):
        kind = int.from_bytes(extensions[at : at + 2], "big")
        data, at = _taken(extensions, at + 2, 2)
        if kind != _KEY_SHARE:
            continue
        where = 2 if in_list else 0
        while where < len(data):
            group = int.from_bytes(data[where : where + 2], "big")
            share, where = _taken(data, where + 2, 2)
            if group == _X25519:
                return share
    raise ValueError("the peer has no share of X25519")


def plain_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Give the kinds and contents of records that are there as a whole."""
    at = 0
    while len(data) >= at + HEADER:
        content, end = _taken(data, at + 3, 2)
        if end > len(data):
            return
        yield data[at], content
        at = end


# Keys.


def _derived(secret: bytes, label: bytes, context: bytes, length: int = 32) -> bytes:
    info = length.to_bytes(2, "big") + vector(b"tls13 " + label, 1) + vector(context, 1)
    return hmac.digest(secret, info + b"\x01", "sha256")[:length]


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Sealer:
    """Makes the records of one direction, or opens them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._cipher = AESGCM(_derived(secret, b"key", b"", 16))
        self._iv = int.from_bytes(_derived(secret, b"iv", b"", 12), "big")
        self._number = 0

    def _nonce(self) -> bytes:
        self._number += 1
        return (self._iv ^ (self._number - 1)).to_bytes(12, "big")

    def seal(self, data: bytes, kind: int = HANDSHAKE, padding: int = 0) -> bytes:
        """Return a record with so many zeros behind its contents."""
        inner = data + bytes([kind]) + bytes(padding)
        header = b"\x17\x03\x03" + (len(inner) + 16).to_bytes(2, "big")
        return header + self._cipher.encrypt(self._nonce(), inner, header)

    def seal_all(self, data: bytes, size: int = LONGEST, padding: int = 0) -> Iterator[bytes]:
        """Give a handshake with so many bytes in a record."""
        for start in range(0, len(data), size):
            yield self.seal(data[start : start + size], padding=padding)

    def open(self, content: bytes) -> tuple[int, bytes]:
        """Return the kind of the next record's contents, and these."""
        header = b"\x17\x03\x03" + len(content).to_bytes(2, "big")
        inner = self._cipher.decrypt(self._nonce(), content, header).rstrip(b"\0")
        return inner[-1], inner[:-1]

    def finished(self, transcript: bytes) -> bytes:
        """Return the message that ends a side's part of the handshake."""
        key = _derived(self._secret, b"finished", b"")
        return message(FINISHED, hmac.digest(key, _hash(transcript), "sha256"))

    def updated(self) -> Sealer:
        """Return the sealer that follows a key update."""
        return Sealer(_derived(self._secret, b"traffic upd", b""))


class Schedule:
    """The secrets of a handshake whose hellos are known.

    Args:
        key: ours.
        share: the peer's.
        transcript: both hellos.
    """

    def __init__(self, key: X25519PrivateKey, share: bytes, transcript: bytes) -> None:
        shared = key.exchange(X25519PublicKey.from_public_bytes(share))
        early = hmac.digest(bytes(32), bytes(32), "sha256")
        self._handshake = hmac.digest(_derived(early, b"derived", _hash(b"")), shared, "sha256")
        self.client = Sealer(_derived(self._handshake, b"c hs traffic", _hash(transcript)))
        self.server = Sealer(_derived(self._handshake, b"s hs traffic", _hash(transcript)))

    def client_afterwards(self, transcript: bytes) -> Sealer:
        """Return the sealer of the client behind the handshake.

        Args:
            transcript: up to the server's last message.
        """
        derived = _derived(self._handshake, b"derived", _hash(b""))
        main = hmac.digest(derived, bytes(32), "sha256")
        return Sealer(_derived(main, b"c ap traffic", _hash(transcript)))


def to_be_signed(transcript: bytes) -> bytes:
    """Return the bytes that a client signs with the key of its certificate."""
    return b" " * 64 + b"TLS 1.3, client CertificateVerify\0" + _hash(transcript)


def certificate_message(chain: Iterable[bytes]) -> bytes:
    """Return the message with a chain of certificates in DER."""
    entries = b"".join(vector(one, 3) + vector(b"", 2) for one in chain)
    return message(CERTIFICATE, vector(b"", 1) + vector(entries, 3))
