"""TLS around a handshake: a stream in memory, which takes one record at a time.

Behind the handshake the connection carries records of another kind, so not a byte beyond it may be
read: a record's header says how long it is. See docs/decisions/0024-encryption.md.

OpenSSL bounds each message of a handshake, but not in how many records it comes, nor their padding:
a chain of certificates has up to 100 KiB there, which may come in as many records of 16 KiB.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TypeVar

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.transport.connect.conversation import Script, Wire
from farcall.transport.connect.credentials import EXPIRED, Certificates, names_of
from farcall.transport.connect.handshake_messages import Ended

BEGINNING = 3  # bytes that tell TLS from a message in plain
_HEADER = 5
_LONGEST = (1 << 14) + 256
_KINDS = range(20, 24)  # change_cipher_spec, alert, handshake, application_data

# The most that a peer may send in TLS's own handshake, and again inside TLS until its last message.
# A worker's chain of certificates has 7 KiB at most (`certificate_signer.py`), and a hello 12.
MOST_RECORDS = 32
MOST_BYTES = 16 << 10

T = TypeVar("T")


def is_tls(beginning: bytes) -> bool:
    """Return whether a connection begins with a handshake of TLS."""
    # A message in plain that is so long would have a zero in the third place.
    return beginning[:2] == b"\x16\x03" and beginning[2] != 0


def has_shown_an_expired_one(error: BaseException) -> bool:
    """Return whether TLS has failed since the peer's certificate, of our authority, has expired."""
    cause = error.__cause__
    return isinstance(cause, ssl.SSLCertVerificationError) and cause.verify_code == EXPIRED


class NotTls(BadFrame):
    """Bytes have come that are no record of TLS. They can still be read from the wire."""


class TlsStream:
    """See `conversation.Stream`.

    Args:
        wire: what the records go over.
        certificates: to show, and to check the peer's by.
        dials: this side connected.
    """

    def __init__(self, wire: Wire, certificates: Certificates, *, dials: bool) -> None:
        self._wire = wire
        self._certificates = certificates
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        contexts = certificates.contexts()
        context = contexts.dialling if dials else contexts.accepting
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not dials)
        self._records = self._bytes = 0  # that have come of this part

    def shake(self) -> Script[None]:
        """Make the connection secure. At the dialler, the peer has yet to agree.

        Raises:
            AuthenticationFailed: a side does not accept the other's certificate.
            NotTls: the peer answers in plain.
            BadFrame: it is no peer of ours, or goes on for longer than one.
        """
        yield from self._run(self._tls.do_handshake)
        self._records = self._bytes = 0

    def names(self) -> list[str]:
        """Return the names that the peer's certificate is for."""
        return names_of(self._tls.getpeercert(binary_form=True))

    def write(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def read(self, count: int) -> Script[bytes]:
        data = b""
        while len(data) < count:
            left = count - len(data)
            piece = yield from self._run(lambda left=left: self._tls.read(left))  # type: ignore[misc]
            if not piece:
                raise Ended("the peer closed the connection during the handshake")
            data += piece
        return data

    def end(self) -> None:
        """Check that nothing came behind the last message.

        Raises:
            BadFrame: something did.
        """
        if self._tls.pending() or self._incoming.pending:
            raise BadFrame("the peer sent more than a handshake")

    def _run(self, act: Callable[[], T]) -> Script[T]:
        while True:
            try:
                result = act()
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError as error:
                self._flush()  # what tells the peer
                raise self._failure(error) from error
            else:
                self._flush()
                return result
            yield from self._take_record()

    def _take_record(self) -> Script[None]:
        header = yield from self._wire.peek(_HEADER)
        length = int.from_bytes(header[3:_HEADER], "big")
        if header[0] not in _KINDS or header[1] != 3 or length > _LONGEST:
            raise NotTls("the peer has begun TLS, and what it sent then is none")
        self._records += 1
        self._bytes += length
        if self._records > MOST_RECORDS or self._bytes > MOST_BYTES:
            raise BadFrame(
                "something that is not farcall is on the other end: a part of its handshake has "
                f"more than {MOST_RECORDS} records of TLS, or {MOST_BYTES >> 10} KiB"
            )
        record = yield from self._wire.read(_HEADER + length)
        self._incoming.write(record)

    def _flush(self) -> None:
        self._wire.write(self._outgoing.read())

    def _failure(self, error: ssl.SSLError) -> LinkError:
        certificates, reason = self._certificates, error.reason or str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthenticationFailed(
                certificates.refused(error.verify_code, error.verify_message)
            )
        words = reason.lower().replace("_", " ")
        if "_ALERT_" in reason:
            return AuthenticationFailed(certificates.refused_by_peer(words.rpartition("alert ")[2]))
        if "CERTIFICATE" in reason:
            return AuthenticationFailed(certificates.refused(0, words))
        return BadFrame(
            f"something that is not farcall is on the other end: TLS ended by {words!r}"
        )
