"""The handshake inside TLS: what a secret or certificates prove, and what each side is told."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from patience import PATIENCE

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.transport.connect import handshake
from farcall.transport.connect.conversation import drive
from farcall.transport.connect.credentials import (
    FileCertificates,
    LinkCredentials,
    SecretCertificates,
    Terms,
)
from farcall.transport.connect.handshake import HandshakeResult
from farcall.transport.connect.handshake_messages import Hello, Identity, NotHere, Refuse
from farcall.transport.connect.knock import knock
from farcall.transport.connect.tls_config import TlsConfig

LEFT = Identity("left", 0, 11)
RIGHT = Identity("right", 1, 22)
SECRET = bytes(range(32))

Pair = tuple[socket.socket, socket.socket]
Outcome = HandshakeResult | BaseException


def of_secret(secret: bytes, **options: Any) -> Terms:
    return Terms(secret, SecretCertificates(secret), **options)


@pytest.fixture(scope="module")
def terms() -> Terms:
    return of_secret(SECRET)


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def soon() -> float:
    return time.monotonic() + PATIENCE


def both(*sides: Callable[[], HandshakeResult]) -> list[Any]:
    """Run two sides at once, and return the result or the error of each."""
    outcomes: dict[int, Outcome] = {}

    def run(index: int, side: Callable[[], HandshakeResult]) -> None:
        try:
            outcomes[index] = side()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(sides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[0], outcomes[1]]


def meet(pair: Pair, left: Terms, right: Terms, me: Identity = LEFT, **options: Any) -> list[Any]:
    options = {"expects": 0, **options}
    return both(
        lambda: handshake.connect(pair[0], me, left, deadline=soon(), **options),
        lambda: accept(pair[1], right),
    )


def accept(sock: socket.socket, terms: Terms) -> HandshakeResult:
    return drive(sock, handshake.accepting(RIGHT, terms, admit=lambda _: None), soon())


# Keys.


def test_both_sides_get_the_same_fresh_keys(pair: Pair, terms: Terms) -> None:
    seen = set()
    for _ in range(2):
        left, right = meet(pair, terms, terms)
        assert (left.peer, right.peer) == (RIGHT, LEFT)
        assert left.keys == right.keys.of_acceptor()
        assert len(left.keys.sending) == len(left.keys.receiving) == 32
        assert left.keys.encrypts
        seen |= {left.keys.sending, left.keys.receiving}
    assert len(seen) == 4


def test_two_processes_make_certificates_of_one_secret(pair: Pair, terms: Terms) -> None:
    left, right = meet(pair, terms, of_secret(SECRET))
    assert (left.peer, right.peer) == (RIGHT, LEFT)


def test_nothing_beyond_the_handshake_is_read(pair: Pair, terms: Terms) -> None:
    def connect_and_go_on() -> HandshakeResult:
        met = handshake.connect(pair[0], LEFT, terms, expects=0, deadline=soon())
        pair[0].sendall(b"first record")
        return met

    def accept_and_go_on() -> HandshakeResult:
        pair[1].settimeout(PATIENCE)
        met = accept(pair[1], terms)
        assert pair[1].recv(100) == b"first record"
        return met

    left, right = both(connect_and_go_on, accept_and_go_on)
    assert (left.peer, right.peer) == (RIGHT, LEFT)


def test_nothing_follows_a_handshake_but_records(pair: Pair, terms: Terms) -> None:
    """Send no session ticket of TLS after the handshake: it would be taken for a record."""
    left, right = meet(pair, terms, terms)
    assert (left.peer, right.peer) == (RIGHT, LEFT)
    for sock in pair:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


def test_repr_of_keys_shows_none(pair: Pair, terms: Terms) -> None:
    left, _ = meet(pair, terms, terms)
    assert repr(left.keys) == "Keys(encrypts=True)"


def test_no_hello_goes_over_the_wire_in_plain(pair: Pair, terms: Terms) -> None:
    seen, (there, here) = bytearray(), socket.socketpair()

    def relay(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)

    with there, here:
        for ends in ((pair[1], there), (there, pair[1])):
            threading.Thread(target=relay, args=ends, daemon=True).start()
        left, right = both(
            lambda: handshake.connect(pair[0], LEFT, terms, expects=0, deadline=soon()),
            lambda: accept(here, terms),
        )
        assert (left.peer, right.peer) == (RIGHT, LEFT)
        for sock in (pair[0], here):
            sock.shutdown(socket.SHUT_RDWR)
    for word in (b"farcall", b"left", b"right", left.keys.sending, left.keys.receiving):
        assert word not in seen


# LinkCredentials that differ.


def test_other_secret_is_refused_on_both_sides(pair: Pair, terms: Terms) -> None:
    for outcome in meet(pair, of_secret(b"another secret"), terms):
        assert isinstance(outcome, AuthenticationFailed)
        assert "check FARCALL_SECRET on both workers" in str(outcome)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("other", [Terms(), Terms(SECRET)], ids=["no secret", "no TLS"])
def test_side_that_does_not_encrypt_is_told_so(
    pair: Pair, terms: Terms, who: int, other: Terms
) -> None:
    outcomes = meet(pair, *((other, terms) if who == 0 else (terms, other)))
    for outcome in outcomes:
        assert isinstance(outcome, AuthenticationFailed)
        assert "FARCALL_SECRET" in str(outcome)


def test_encryption_must_be_agreed(pair: Pair, terms: Terms) -> None:
    for outcome in meet(pair, of_secret(SECRET, encrypts=False), terms):
        assert isinstance(outcome, AuthenticationFailed)
        assert "FARCALL_ENCRYPT" in str(outcome)


def test_both_may_do_without_encryption(pair: Pair) -> None:
    plain = of_secret(SECRET, encrypts=False)
    left, right = meet(pair, plain, plain)
    assert left.keys == right.keys.of_acceptor()
    assert not left.keys.encrypts


def test_worker_that_is_not_meant_says_so_inside(pair: Pair, terms: Terms) -> None:
    for outcome in meet(pair, terms, terms, expects=23):
        assert type(outcome) is NotHere


# Strangers.


def test_impostor_without_tls_can_not_tell_of_an_absence(pair: Pair, terms: Terms) -> None:
    def impostor() -> HandshakeResult:
        data = msgspec.msgpack.encode(Refuse("w1 is not here", "absent"))
        pair[1].sendall(struct.pack("<I", len(data)) + data)
        return HandshakeResult(RIGHT, None)

    left, _ = both(
        lambda: handshake.connect(pair[0], LEFT, terms, expects=22, deadline=soon()), impostor
    )
    assert type(left) is AuthenticationFailed


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(20), b"\x16\x03\x03\xff\xff" + bytes(20)]
)
@pytest.mark.parametrize("dials", [True, False])
def test_bytes_of_another_protocol_raise_bad_frame(
    pair: Pair, terms: Terms, data: bytes, dials: bool
) -> None:
    pair[1].sendall(data if dials else knock(SECRET) + data)
    side = partial(handshake.connect, me=LEFT, expects=0, deadline=soon()) if dials else accept
    with pytest.raises(BadFrame, match="not farcall"):
        side(pair[0], terms=terms)


@pytest.mark.parametrize("beginning", [b"", knock(bytes(32))], ids=["no knock", "a wrong one"])
def test_no_tls_is_begun_with_a_peer_that_has_not_shown_the_secret(
    pair: Pair, terms: Terms, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "TlsStream", None)
    pair[0].sendall(beginning + b"\x16\x03\x03\xff\xff" + bytes(20))
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(AuthenticationFailed, match="could not show that it knows our secret"):
        accept(pair[1], terms)


def test_connection_to_itself_is_no_peer(terms: Terms) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        with pytest.raises(BadFrame):
            handshake.connect(sock, LEFT, terms, expects=0, deadline=soon())


def client_of(version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if version is not None:
        context.maximum_version = version
    return context


@pytest.mark.parametrize("version", [None, ssl.TLSVersion.TLSv1_2], ids=["no certificate", "1.2"])
def test_client_without_our_certificate_gets_nothing(
    pair: Pair, terms: Terms, version: ssl.TLSVersion | None
) -> None:

    def stranger() -> HandshakeResult:
        pair[0].settimeout(PATIENCE)
        with client_of(version).wrap_socket(pair[0].dup()) as sock:
            sock.sendall(b"x")
            raise AssertionError(f"it heard {sock.recv(1)!r}")

    left, right = both(stranger, lambda: accept(pair[1], terms))
    assert isinstance(left, ssl.SSLError)
    assert isinstance(right, LinkError)


def test_more_than_a_handshake_inside_tls_is_refused(pair: Pair, terms: Terms) -> None:
    """Bytes behind `ready` in its record would be lost, or be read by another reader."""
    assert terms.certificates is not None
    context = terms.certificates.contexts().dialling

    def say(sock: ssl.SSLSocket, *messages: object) -> None:
        parts = [msgspec.msgpack.encode(message) for message in messages]
        sock.sendall(b"".join(struct.pack("<I", len(part)) + part for part in parts))

    def crafty() -> HandshakeResult:
        with context.wrap_socket(pair[0].dup()) as sock:
            hello = Hello("farcall", 1, "left", 0, 11, 0, "", "", "", bytes(32), False)
            say(sock, msgspec.structs.replace(hello, key=bytes(32)))
            sock.recv(1 << 16)
            say(sock, ["ready"], ["ready"])
        return HandshakeResult(LEFT, None)

    _, right = both(crafty, lambda: accept(pair[1], Terms(None, terms.certificates)))
    assert isinstance(right, BadFrame)
    assert "more than a handshake" in str(right)


# Certificates.


class Authority:
    """A certificate authority, and where it puts what it issues."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        made = self._sign(self.name, self.key.public_key(), is_ca=True)
        self.ca.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        days: float = 1,
        names: tuple[x509.GeneralName, ...] = (),
        usages: tuple[x509.ObjectIdentifier, ...] = (),
        is_ca: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, now + day * days) - day)
            .not_valid_after(now + day * days)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def issue(self, name: str, *, names_bound: bool = False, **how: Any) -> TlsConfig:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert = self._sign(subject, key.public_key(), **how)
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[1].touch(mode=0o600)
        paths[0].write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return TlsConfig(*map(str, paths), str(self.ca), names_bound)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def of(config: TlsConfig, secret: bytes | None = None) -> Terms:
    return Terms(secret, FileCertificates(config))


@pytest.mark.parametrize("secret", [None, SECRET])
def test_certificates_of_one_authority_do(
    pair: Pair, authority: Authority, secret: bytes | None
) -> None:
    left, right = meet(pair, *(of(authority.issue(name), secret) for name in ("left", "right")))
    assert (left.peer, right.peer) == (RIGHT, LEFT)
    assert left.keys == right.keys.of_acceptor()


@pytest.mark.parametrize("who", [0, 1])
def test_certificate_of_another_authority_is_refused_on_both_sides(
    pair: Pair, authority: Authority, tmp_path: Path, who: int
) -> None:
    wrong = Authority(tmp_path, "other").issue("wrong")
    terms = [of(authority.issue("good")), of(TlsConfig(wrong.cert, wrong.key, str(authority.ca)))]
    outcomes = meet(pair, *(terms if who else terms[::-1]))
    for outcome in outcomes:
        assert isinstance(outcome, AuthenticationFailed)
        assert "take one CA for all workers" in str(outcome)


def expire(monkeypatch: pytest.MonkeyPatch, authority: Authority, name: str) -> Terms:
    """Return the terms of a worker whose certificate has expired since it began."""
    with monkeypatch.context() as patch:
        patch.setattr("farcall.transport.connect.credentials._check_time", lambda *_: None)
        return of(authority.issue(name, days=-1))


@pytest.mark.parametrize("who", [0, 1])
def test_expired_certificate_is_refused_on_both_sides(
    pair: Pair, authority: Authority, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    terms = [of(authority.issue("good")), expire(monkeypatch, authority, "old")]
    for outcome in meet(pair, *(terms if who else terms[::-1])):
        assert isinstance(outcome, AuthenticationFailed)
        assert "has expired: renew it" in str(outcome)


@pytest.mark.parametrize("who", [0, 1])
def test_certificate_for_one_direction_only_is_refused(
    pair: Pair, authority: Authority, who: int
) -> None:
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH][who]
    half = [of(authority.issue("good")), of(authority.issue("half", usages=(usage,)))]
    outcomes = meet(pair, *(half if who else half[::-1]))
    assert all(isinstance(outcome, AuthenticationFailed) for outcome in outcomes)
    assert any("issue it for both" in str(outcome) for outcome in outcomes)


NAMES = {
    "DNS": x509.DNSName("left"),
    "URI": x509.UniformResourceIdentifier("farcall:left"),
    "SPIFFE": x509.UniformResourceIdentifier("spiffe://cluster/worker/left"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_name_of_the_certificate_is_the_workers(
    pair: Pair, authority: Authority, kind: str
) -> None:
    mine = authority.issue("one", names=(NAMES[kind],), names_bound=True)
    other = authority.issue("other", names=(x509.DNSName("right"),), names_bound=True)
    left, right = meet(pair, of(mine), of(other))
    assert (left.peer, right.peer) == (RIGHT, LEFT)


@pytest.mark.parametrize("kind", ["wrong", "none"])
@pytest.mark.parametrize("who", [0, 1])
def test_certificate_for_another_name_is_refused_on_both_sides(
    pair: Pair, authority: Authority, kind: str, who: int
) -> None:
    named = [x509.DNSName("left"), x509.DNSName("right")]
    names: list[tuple[x509.GeneralName, ...]] = [(name,) for name in named]
    names[who] = (x509.DNSName("ps"),) if kind == "wrong" else ()
    terms = [of(authority.issue(f"n{n}", names=names[n], names_bound=True)) for n in range(2)]
    for outcome in meet(pair, *terms):
        assert isinstance(outcome, AuthenticationFailed)
        assert f"subjectAltName=DNS:{['left', 'right'][who]}" in str(outcome)


def test_renewed_certificate_is_read_without_a_restart(
    pair: Pair, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, old = of(authority.issue("good")), expire(monkeypatch, authority, "old")
    assert all(isinstance(outcome, AuthenticationFailed) for outcome in meet(pair, good, old))
    authority.issue("old")
    left, right = socket.socketpair()
    with left, right:
        met = meet((left, right), good, old)
    assert [outcome.peer for outcome in met] == [RIGHT, LEFT]


def test_broken_renewal_leaves_the_former_certificate(
    pair: Pair, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    good, config = of(authority.issue("good")), authority.issue("changing")
    changing = of(config)
    Path(config.cert).write_text("half a certi")
    left, right = meet(pair, good, changing)
    assert (left.peer, right.peer) == (RIGHT, LEFT)
    assert "going on with the former certificate" in caplog.text


def test_files_that_can_not_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue("good")
    missing = str(tmp_path / "missing.pem")
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    locked = tmp_path / "locked.key"
    locked.touch(mode=0o600)
    locked.write_bytes(
        authority.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )
    expired = authority.issue("expired", days=-1)
    for config, words in (
        (TlsConfig(missing, good.key, good.ca), f"certificate.*{missing}"),
        (TlsConfig(good.cert, missing, good.ca), f"key.*{missing}"),
        (TlsConfig(good.cert, good.key, missing), f"CA.*{missing}"),
        (TlsConfig(good.key, good.key, good.ca), f"{good.key} is no certificate"),
        (TlsConfig(good.cert, good.cert, good.ca), "PEM"),
        (TlsConfig(good.cert, good.key, str(empty)), f"{empty}"),
        (TlsConfig(good.cert, expired.key, good.ca), "does not belong to the certificate"),
        (TlsConfig(good.cert, str(locked), good.ca), "passphrase"),
        (expired, "has expired on .*: renew it"),
    ):
        with pytest.raises(ValueError, match=words):
            LinkCredentials(tls=config)


# Which connections.


def test_unix_sockets_stay_plain(pair: Pair) -> None:
    credentials = LinkCredentials(SECRET)
    assert credentials.over(pair[0]) == Terms(SECRET, is_local=True)
    with socket.socket() as tcp:
        assert credentials.over(tcp).certificates is not None
        assert LinkCredentials().over(tcp) == Terms()
