"""The attacks of hostile clients and servers of TLS, as scripts without I/O.

A script gives the bytes that it sends, piece by piece, and `b""` to wait for more of the peer's
words. One that ends says no more and keeps the connection.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import raw_tls as tls
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

WAIT = b""

MEGABYTES = 2 << 20
THOUSANDS = 4000
ALLOWED = 96 << 10  # bytes: OpenSSL takes chains of 100 KiB
BELOW = 14 << 10  # farcall takes handshakes of 16


class Peer:
    """The other end.

    Attributes:
        heard: all that it has said.
    """

    def __init__(self) -> None:
        self.heard = bytearray()


Script = Callable[[Peer], Iterator[bytes]]


# Certificates that no authority stands for.


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@functools.cache
def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@functools.cache
def _certificate(number: int = 0, extension: int = 0, names: int = 0) -> bytes:
    """Return one that is issued by that of the next number, in DER.

    Args:
        extension: bytes of an extension that means nothing.
        names: how many it is for.
    """
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(f"c{number}"))
        .issuer_name(_name(f"c{number + 1}"))
        .public_key(_key().public_key())
        .serial_number(number + 1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(True, None), critical=True)
    )
    if extension:
        oid = x509.ObjectIdentifier("1.2.3.4")
        unknown = x509.UnrecognizedExtension(oid, bytes(extension))
        builder = builder.add_extension(unknown, critical=False)
    if names:
        many = [x509.DNSName(f"worker{number}.example") for number in range(names)]
        builder = builder.add_extension(x509.SubjectAlternativeName(many), critical=False)
    return builder.sign(_key(), SHA256()).public_bytes(Encoding.DER)


@functools.cache
def _thousands() -> bytes:
    return tls.certificate_message([_certificate()] * THOUSANDS)


@functools.cache
def _megabytes() -> bytes:
    return tls.certificate_message([_certificate(extension=MEGABYTES)])


@functools.cache
def _many_names() -> bytes:
    return tls.certificate_message([_certificate(names=4000)])


@functools.cache
def _chain(size: int) -> bytes:
    """Return the message with a chain of about so many bytes."""
    count = size // (len(_certificate(1000)) + 5)
    return tls.certificate_message([_certificate(number) for number in range(count)])


def _as_long_as_openssl_allows() -> bytes:
    return _chain(ALLOWED)


def _as_long_as_farcall_allows() -> bytes:
    return _chain(BELOW)


# Clients.


class Met(NamedTuple):
    """A handshake whose hellos were exchanged."""

    schedule: tls.Schedule
    transcript: bytes


def _greet(peer: Peer, *, more: tuple[tuple[int, bytes], ...] = ()) -> Generator[bytes, None, Met]:
    key = X25519PrivateKey.generate()
    mine = tls.client_hello(key, more=more)
    yield from tls.in_records(mine)
    found = yield from _hello_of(peer)
    return Met(tls.Schedule(key, found.share, mine + found.whole), mine + found.whole)


def _hello_of(peer: Peer) -> Generator[bytes, None, tls.Heard]:
    while (found := tls.hello_in(bytes(peer.heard))) is None:
        yield WAIT
    return found


def _hello(more: tuple[tuple[int, bytes], ...] = ()) -> bytes:
    return tls.client_hello(X25519PrivateKey.generate(), more=more)


_HUGE = ((0xFAFA, bytes(60_000)),)


def plain_text(peer: Peer) -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\n\r\n"


def silence(peer: Peer) -> Iterator[bytes]:
    yield from ()


def half_a_hello(peer: Peer) -> Iterator[bytes]:
    yield tls.record(tls.HANDSHAKE, _hello())[:60]


def old_version(peer: Peer) -> Iterator[bytes]:
    key = X25519PrivateKey.generate()
    yield from tls.in_records(tls.client_hello(key, versions=b"\x03\x03"))


def huge_hello(peer: Peer) -> Iterator[bytes]:
    yield from tls.in_records(_hello(_HUGE))


def hello_without_end(peer: Peer) -> Iterator[bytes]:
    start = tls.record(tls.HANDSHAKE, b"\x01\xff\xff\xff" + bytes(tls.LONGEST - 4))
    return itertools.chain([start], itertools.repeat(tls.record(tls.HANDSHAKE, bytes(tls.LONGEST))))


def hello_in_small_records(peer: Peer) -> Iterator[bytes]:
    yield from tls.in_records(_hello(_HUGE), 1)


def slow_hello(peer: Peer) -> Iterator[bytes]:
    return _bytewise(tls.record(tls.HANDSHAKE, _hello()))


def _bytewise(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def empty_records(peer: Peer) -> Iterator[bytes]:
    yield from tls.in_records(_hello())
    yield from itertools.repeat(tls.record(tls.HANDSHAKE, b""))


def changes_of_ciphers(peer: Peer) -> Iterator[bytes]:
    yield from tls.in_records(_hello())
    yield from itertools.repeat(tls.record(tls.CHANGE_CIPHER_SPEC, b"\x01"))


def warnings(peer: Peer) -> Iterator[bytes]:
    yield from itertools.repeat(tls.record(tls.ALERT, b"\x01\x5a"))


def second_hello(peer: Peer) -> Iterator[bytes]:
    met = yield from _greet(peer)
    while True:  # as one that would negotiate anew
        yield from met.schedule.client.seal_all(_hello())


def early_data(peer: Peer) -> Iterator[bytes]:
    """Data before the handshake is over, without end."""
    yield from tls.in_records(_hello(((42, b""),)))
    yield from itertools.repeat(tls.record(tls.APPLICATION_DATA, os.urandom(tls.LONGEST)))


def stops_in_the_middle(peer: Peer) -> Iterator[bytes]:
    yield from _greet(peer)


def key_updates_too_soon(peer: Peer) -> Iterator[bytes]:
    met = yield from _greet(peer)
    while True:
        yield met.schedule.client.seal(tls.message(tls.KEY_UPDATE, b"\x01"))


def _certifying(make: Callable[[], bytes], size: int = tls.LONGEST, padding: int = 0) -> Script:
    def script(peer: Peer) -> Iterator[bytes]:
        met = yield from _greet(peer)
        yield from met.schedule.client.seal_all(make(), size, padding)

    return script


def slow_certificate(peer: Peer) -> Iterator[bytes]:
    met = yield from _greet(peer)
    for one in met.schedule.client.seal_all(_as_long_as_farcall_allows()):
        yield from _bytewise(one)


def one_hello(peer: Peer) -> Iterator[bytes]:
    yield from tls.in_records(_hello())


def hello_in_records_of_five(peer: Peer) -> Iterator[bytes]:
    """Send an honest hello, in as many records as are taken: the peer answers it."""
    yield from tls.in_records(_hello(), 5)


CLIENTS: dict[str, Script] = {
    "plain text": plain_text,
    "silence": silence,
    "half a hello": half_a_hello,
    "TLS 1.2": old_version,
    "huge hello": huge_hello,
    "hello without end": hello_without_end,
    "hello in records of a byte": hello_in_small_records,
    "slow hello": slow_hello,
    "empty records": empty_records,
    "changes of ciphers": changes_of_ciphers,
    "warnings": warnings,
    "second hello": second_hello,
    "early data": early_data,
    "never reads": one_hello,
    "stops behind the server's flight": stops_in_the_middle,
    "key updates too soon": key_updates_too_soon,
    "thousands of certificates": _certifying(_thousands),
    "certificate of megabytes": _certifying(_megabytes),
    "thousands of names": _certifying(_many_names),
    "chain as long as OpenSSL allows": _certifying(_as_long_as_openssl_allows),
    "chain as long as farcall allows": _certifying(_as_long_as_farcall_allows),
    "certificates in records of a byte": _certifying(_as_long_as_openssl_allows, 1),
    "certificates in records of zeros": _certifying(_as_long_as_openssl_allows, 1, tls.LONGEST - 1),
    "slow certificates": slow_certificate,
}


class Certified:
    """A client with a certificate that is accepted: of a thief, or of a member that turned.

    Args:
        cert: of a worker, in PEM.
        key: its private key, in PEM.
        afterwards: gives the records behind the handshake, made by the sealer for these.
    """

    def __init__(
        self, cert: bytes, key: bytes, afterwards: Callable[[tls.Sealer], Iterator[bytes]]
    ) -> None:
        self._chain = [
            one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(cert)
        ]
        loaded = load_pem_private_key(key, None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self._key = loaded
        self._afterwards = afterwards

    def __call__(self, peer: Peer) -> Iterator[bytes]:
        met = yield from _greet(peer)
        transcript = met.transcript + (yield from _flight(peer, met.schedule.server))
        sealer = met.schedule.client_afterwards(transcript)
        certificate = tls.certificate_message(self._chain)
        signature = self._key.sign(tls.to_be_signed(transcript + certificate), ec.ECDSA(SHA256()))
        verify = tls.message(tls.CERTIFICATE_VERIFY, b"\x04\x03" + tls.vector(signature, 2))
        said = certificate + verify
        said += met.schedule.client.finished(transcript + said)
        yield from met.schedule.client.seal_all(said)
        yield from self._afterwards(sealer)


def _flight(peer: Peer, sealer: tls.Sealer) -> Generator[bytes, None, bytes]:
    """Return the server's messages behind its hello."""
    opened, said = 0, b""
    while True:
        sealed = [
            content
            for kind, content in tls.plain_records(bytes(peer.heard))
            if kind == tls.APPLICATION_DATA
        ]
        for content in sealed[opened:]:
            _, data = sealer.open(content)
            said += data
        opened = len(sealed)
        if _last_kind(said) == tls.FINISHED:
            return said
        yield WAIT


def _last_kind(said: bytes) -> int:
    at, kind = 0, 0
    while at < len(said):
        kind, at = said[at], at + 4 + int.from_bytes(said[at + 1 : at + 4], "big")
    return kind if at == len(said) else 0


def key_updates(sealer: tls.Sealer) -> Iterator[bytes]:
    """Updates without end, each of which asks for one in return."""
    while True:
        yield sealer.seal(tls.message(tls.KEY_UPDATE, b"\x01"))
        sealer = sealer.updated()


def renegotiation(sealer: tls.Sealer) -> Iterator[bytes]:
    yield from sealer.seal_all(_hello())


def nothing_inside(sealer: tls.Sealer) -> Iterator[bytes]:
    """Records that have nothing but zeros in them, without end."""
    while True:
        yield sealer.seal(b"", tls.APPLICATION_DATA, tls.LONGEST)


AFTERWARDS: dict[str, Callable[[tls.Sealer], Iterator[bytes]]] = {
    "key updates": key_updates,
    "renegotiation": renegotiation,
    "records of zeros": nothing_inside,
}


# Servers.


def _answer(peer: Peer) -> Generator[bytes, None, tls.Schedule]:
    found = yield from _hello_of(peer)
    key = X25519PrivateKey.generate()
    mine = tls.server_hello(key, found.session)
    yield from tls.in_records(mine)
    schedule = tls.Schedule(key, found.share, found.whole + mine)
    yield schedule.server.seal(tls.message(tls.ENCRYPTED_EXTENSIONS, tls.vector(b"", 2)))
    return schedule


def _showing(make: Callable[[], bytes], size: int = tls.LONGEST, padding: int = 0) -> Script:
    def script(peer: Peer) -> Iterator[bytes]:
        schedule = yield from _answer(peer)
        yield from schedule.server.seal_all(make(), size, padding)

    return script


def old_server(peer: Peer) -> Iterator[bytes]:
    found = yield from _hello_of(peer)
    key = X25519PrivateKey.generate()
    yield from tls.in_records(tls.server_hello(key, found.session, version=b"\x03\x03"))


def huge_answer(peer: Peer) -> Iterator[bytes]:
    yield from _hello_of(peer)
    start = tls.record(tls.HANDSHAKE, b"\x02\xff\xff\xff" + bytes(tls.LONGEST - 4))
    yield start
    yield from itertools.repeat(tls.record(tls.HANDSHAKE, bytes(tls.LONGEST)))


def answer_in_small_records(peer: Peer) -> Iterator[bytes]:
    yield from _hello_of(peer)
    yield from tls.in_records(b"\x02\x00\x40\x00" + bytes(0x4000), 1)


def slow_answer(peer: Peer) -> Iterator[bytes]:
    found = yield from _hello_of(peer)
    hello = tls.server_hello(X25519PrivateKey.generate(), found.session)
    yield from _bytewise(tls.record(tls.HANDSHAKE, hello))


def slow_chain(peer: Peer) -> Iterator[bytes]:
    schedule = yield from _answer(peer)
    for one in schedule.server.seal_all(_as_long_as_farcall_allows()):
        yield from _bytewise(one)


def changes_without_end(peer: Peer) -> Iterator[bytes]:
    yield from _hello_of(peer)
    yield from itertools.repeat(tls.record(tls.CHANGE_CIPHER_SPEC, b"\x01"))


def server_that_updates_keys(peer: Peer) -> Iterator[bytes]:
    schedule = yield from _answer(peer)
    while True:
        yield schedule.server.seal(tls.message(tls.KEY_UPDATE, b"\x01"))


def message_in_plain(peer: Peer) -> Iterator[bytes]:
    """Announce a message of farcall's own protocol, as long as one may be, which never comes."""
    yield from _hello_of(peer)
    yield (12 << 10).to_bytes(4, "little")


def plain_hello(peer: Peer) -> Iterator[bytes]:
    found = yield from _hello_of(peer)
    yield from tls.in_records(tls.server_hello(X25519PrivateKey.generate(), found.session))


SERVERS: dict[str, Script] = {
    "plain text": plain_text,
    "silence": silence,
    "TLS 1.2": old_server,
    "huge answer": huge_answer,
    "answer in records of a byte": answer_in_small_records,
    "slow answer": slow_answer,
    "changes of ciphers": changes_without_end,
    "warnings": warnings,
    "key updates": server_that_updates_keys,
    "thousands of certificates": _showing(_thousands),
    "certificate of megabytes": _showing(_megabytes),
    "thousands of names": _showing(_many_names),
    "chain as long as OpenSSL allows": _showing(_as_long_as_openssl_allows),
    "chain as long as farcall allows": _showing(_as_long_as_farcall_allows),
    "certificates in records of a byte": _showing(_as_long_as_openssl_allows, 1),
    "certificates in records of zeros": _showing(_as_long_as_openssl_allows, 1, tls.LONGEST - 1),
    "slow certificates": slow_chain,
    "half a message in plain": message_in_plain,
    "hangs up": plain_hello,
}

DEAF = {"never reads"}
HANGS_UP = {"hangs up"}
ENDS_LATE = {"silence", "slow answer", "slow certificates", "half a message in plain", "hangs up"}
"""Servers that look as a busy worker does: a call to one ends by its own limit."""

SLOW = {"slow hello", "slow certificates", "slow answer"}
