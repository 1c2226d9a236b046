"""The credentials of a process: the group's secret, certificates, or both.

Over TCP both kinds end in certificates, for TLS 1.3 in both directions. Of a secret HKDF makes the
key of a certificate authority, the same in every process that knows the secret, and each process
makes itself a certificate under that authority. So a peer with a certificate that is accepted knows
the secret. The keys of connections are exchanged as in all of TLS 1.3: recorded traffic stays
closed if the secret becomes known later. The proofs of `handshake.py` come on top, and are all
there is over Unix sockets.

Python's `ssl` reads a certificate's key from a file only. Ours is in a file that no other process
can open and that is gone when it was read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import logging
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from farcall.log import get_logger
from farcall.transport.connect.addresses import is_unix
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.tls_config import TlsConfig, contents

logger = get_logger("farcall.transport")

CHECK_SECRET = "check FARCALL_SECRET on both workers"

_COARSE = 2_000_000_000  # nanoseconds between two times of a file, at most, on any file system

EXPIRED, _NOT_YET_VALID, _WRONG_PURPOSE = 10, 9, 26  # X509_V_ERR_... of OpenSSL


T = TypeVar("T")


class _FileState(NamedTuple):
    """The state of a file; the mode decides whether a key is taken."""

    changed: int  # nanoseconds since 1970; its mode, owner or name as well
    written: int
    size: int
    inode: int
    mode: int


_State = list[_FileState | None]


class TlsContexts(NamedTuple):
    """For connections in either direction."""

    dialling: ssl.SSLContext
    accepting: ssl.SSLContext


class Certificates(Protocol):
    """The source of a process's certificates. Safe from any thread.

    Attributes:
        binds_names: a peer's certificate must be for the name of its worker.
    """

    binds_names: bool

    def contexts(self) -> TlsContexts:
        """Return what a new connection uses."""

    def refused(self, verify_code: int, message: str) -> str:
        """Return the fault of the peer's certificate, and its remedy."""

    def refused_by_peer(self, alert: str) -> str:
        """Return the fault of ours, given the alert that came back."""


def shown_as_it_is(me: Identity) -> Identity:
    """Return what a worker says of itself: it shows nothing beside."""
    return me


class Terms(NamedTuple):
    """The credentials that are required on one connection, and shown.

    Attributes:
        secret: for the proofs; None: there are none.
        certificates: for TLS around the handshake; None: there is none.
        encrypts: records behind it are encrypted, and not only authenticated.
        is_local: at the other end is a process of this user on this machine.
        shown: gives what the dialler says of itself, see `Listening`.
    """

    secret: bytes | None = None
    certificates: Certificates | None = None
    encrypts: bool = True
    is_local: bool = False
    shown: Callable[[Identity], Identity] = shown_as_it_is


class LinkCredentials:
    """The credentials that this process proves itself with.

    Args:
        secret: of the group, or None.
        tls: certificates that take the place of those made of the secret.
        encrypts, shown: as in `Terms`.
        at_once: make certificates of the secret now, and not for the first connection over TCP.
            With the import that takes some 50 ms.

    Raises:
        ValueError: the files of the certificates can't be used; the message says why.
    """

    def __init__(
        self,
        secret: bytes | None = None,
        tls: TlsConfig | None = None,
        *,
        encrypts: bool = True,
        shown: Callable[[Identity], Identity] = shown_as_it_is,
        at_once: bool = False,
    ) -> None:
        self._over_unix = Terms(secret, is_local=True, shown=shown)
        self._encrypts = encrypts
        self._files = None if tls is None else FileCertificates(tls)
        if at_once:
            _ = self._over_tcp

    def over(self, sock: socket.socket) -> Terms:
        """Return the terms of a connection. Unix sockets stay within a user's processes."""
        return self._over_unix if is_unix(sock) else self._over_tcp

    @cached_property
    def _over_tcp(self) -> Terms:
        # Not at every start: workers of one host never need it. Two threads may make it at once;
        # either is good.
        secret = self._over_unix.secret
        made = None if secret is None or self._files else SecretCertificates(secret)
        return Terms(secret, self._files or made, self._encrypts, shown=self._over_unix.shown)


class SecretCertificates:
    """See `Certificates`: made of the group's secret."""

    binds_names = False

    def __init__(self, secret: bytes) -> None:
        ca, worker = _certificates().made_of(secret)
        with _as_file(worker) as path:
            self._contexts = _contexts(path, None, cadata=ca)

    def contexts(self) -> TlsContexts:
        return self._contexts

    def refused(self, verify_code: int, message: str) -> str:
        return f"the peer could not prove that it knows our secret ({message}): {CHECK_SECRET}"

    def refused_by_peer(self, alert: str) -> str:
        return f"this worker could not prove that it knows the secret ({alert}): {CHECK_SECRET}"


class Renewed(Generic[T]):
    """An object made of the files of a `TlsConfig`, and anew when they have changed. Thread-safe.

    Args:
        config: names the files.
        purpose: what that is for, as the log says it.
        make: makes it of the content of the files: certificate, key and authorities.

    Raises:
        ValueError: the files can't be used, or `make` says so.
    """

    def __init__(
        self, config: TlsConfig, purpose: str, make: Callable[[bytes, bytes, bytes], T]
    ) -> None:
        self._config = config
        self._purpose = purpose
        self._make = make
        self._lock = threading.Lock()  # guards what follows
        self._seen: _State | None = None  # where there is none, the contents are compared
        state, files = self._state(), self._read()
        self._tried = _digest(state, files)
        self._made = self._make_of(files)

    def get(self) -> T:
        """Return the product of the files as they are now; of the former ones if they are bad."""
        with self._lock:
            said = self._look()
            made = self._made
        if said is not None:
            logger.log(*said)  # without the lock: a handler may send the line over a new link
        return made

    def _look(self) -> tuple[Any, ...] | None:
        """Make it anew if the files have changed; return what to log."""
        state = self._state()
        if state == self._seen:
            return None
        files: list[bytes] = []
        problem: Exception | None = None
        try:
            files = self._read()
        except ValueError as error:
            problem = error
        if self._state() != state:
            return None  # they are being replaced: the next connection finds them whole
        self._seen = None if _may_change_unseen(state) else state
        tried = _digest(state, files if problem is None else [str(problem).encode()])
        if tried == self._tried:
            return None
        self._tried = tried
        if problem is None:
            try:
                self._made = self._make_of(files)
                what = "read %s again, for %s: it has changed"
                return logging.INFO, what, self._config.cert, self._purpose
            except Exception as error:  # whatever a library makes of a file
                problem = error
        what = "going on with the former certificate for %s: %s"
        return logging.WARNING, what, self._purpose, problem

    def _state(self) -> _State:
        return [_state_of(path) for path in (self._config.cert, self._config.key, self._config.ca)]

    def _read(self) -> list[bytes]:
        config = self._config
        named = (("certificate", config.cert), ("key", config.key), ("CA", config.ca))
        return [contents(what, path) for what, path in named]

    def _make_of(self, files: list[bytes]) -> T:
        _check_time(self._config.cert, files[0])
        return self._make(*files)


class FileCertificates:
    """See `Certificates`: of the user's own authority.

    Raises:
        ValueError: the files can't be used.
    """

    def __init__(self, config: TlsConfig) -> None:
        self.binds_names = config.names
        self._config = config
        self._files = Renewed(config, "links", self._read)

    def contexts(self) -> TlsContexts:
        return self._files.get()

    def _read(self, *_: bytes) -> TlsContexts:
        config = self._config
        try:
            contexts = _contexts(config.cert, config.key, cafile=config.ca)
            _check_mode(config.key)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(
                f"can't use the certificate {config.cert} with the key {config.key} and the CA "
                f"{config.ca}: {_why(error)}"
            ) from error
        return contexts

    def refused(self, verify_code: int, message: str) -> str:
        ca = self._config.ca
        what = {
            EXPIRED: "or that of its CA has expired: renew it (its worker's log names the file); a "
            "running worker reads it again",
            _NOT_YET_VALID: "is not valid yet: check the clocks of both hosts",
            _WRONG_PURPOSE: "is not good for servers and for clients: issue it for both",
        }.get(verify_code, f"({message}) is not of our CA, {ca}: take one CA for all workers")
        return f"the peer's certificate {what}"

    def refused_by_peer(self, alert: str) -> str:
        cert = self._config.cert
        if "expired" in alert:
            return f"our certificate {cert} has expired: renew it; a running worker reads it again"
        if "unknown ca" in alert:
            return f"our certificate {cert} is not of the peer's CA: take one CA for all workers"
        return f"the peer does not accept our certificate {cert} ({alert})"


def names_of(certificate: bytes | None) -> list[str]:
    """Return the names of workers that a certificate is for, which is in DER."""
    names: list[str] = [] if certificate is None else _certificates().names_in(certificate)
    return names


def _certificates() -> ModuleType:
    """Return what makes and reads certificates: imported when they are needed, as that takes long.

    Workers of one host, which talk over Unix sockets and shared memory, never need it.
    """
    return importlib.import_module("farcall.transport.connect.certificates")


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Give some bytes a path for a moment, which no other user can open."""
    if hasattr(os, "memfd_create"):
        fd, path = os.memfd_create("farcall"), ""
        name = f"/proc/self/fd/{fd}"
    else:
        fd, path = tempfile.mkstemp(prefix="farcall-")
        name = path
    try:
        with open(fd, "wb", buffering=0) as file:
            file.write(data)
            yield name
    finally:
        if path:
            os.unlink(path)


def _contexts(
    cert: str, key: str | None, *, cafile: str | None = None, cadata: str | None = None
) -> TlsContexts:
    return TlsContexts(
        *(
            _context(protocol, cert, key, cafile, cadata)
            for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
    )


def _context(
    protocol: int, cert: str, key: str | None, cafile: str | None, cadata: str | None
) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # hosts have any name; see `TlsConfig.names`
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # they would come behind the handshake, where records are
    context.load_cert_chain(cert, key, password=refuse_passphrase)  # else it asks at the terminal
    context.load_verify_locations(cafile=cafile, cadata=cadata)
    return context


def refuse_passphrase() -> NoReturn:
    """Raise ValueError: no person is there to type one."""
    raise ValueError("the key of TlsConfig has a passphrase: store it without one, for you alone")


def _digest(state: _State, files: Sequence[bytes]) -> bytes:
    """Return a value that files of other contents or modes do not have."""
    modes = repr([None if one is None else one.mode for one in state]).encode()
    return b"".join(hashlib.sha256(one).digest() for one in (modes, *files))


def _may_change_unseen(state: _State) -> bool:
    """Return whether a file is so new that its next change may leave it the same times and size."""
    now = time.time_ns()
    return any(one is not None and abs(now - one.changed) < _COARSE for one in state)


def _state_of(path: str) -> _FileState | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _FileState(
        found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
    )


def _check_mode(path: str) -> None:
    if os.name == "posix" and os.stat(path).st_mode & 0o077:
        raise ValueError(f"others can read the key of TlsConfig: run chmod 600 {path}")


def _check_time(path: str, data: bytes) -> None:
    try:
        end: datetime.datetime = _certificates().end_of(data)
    except ValueError as error:
        raise ValueError(f"{path} is no certificate in PEM format: {error}") from error
    if end < datetime.datetime.now(datetime.UTC):
        raise ValueError(f"the certificate {path} has expired on {end:%Y-%m-%d}: renew it")


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None) or str(error)
    if "KEY_VALUES_MISMATCH" in reason:
        return "the key does not belong to the certificate"
    return f"{reason}; they must be PEM files"
