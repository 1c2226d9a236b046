"""Steps of a process without any credential: it tries to get in, in every way that it knows."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
from collections import deque
from pathlib import Path

import attacker
from patience import PATIENCE

NOBODY = 65534


def become_nobody() -> int:
    """Become another user of the machine, if this one may; return who this process is."""
    "localhost".encode("idna")  # another user may not read the codecs that are not loaded yet
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return os.geteuid()


_names: list[socket.socket] = []


def take_name(name: str) -> None:
    """Listen at an abstract name, which may be any bytes, and accept nothing."""
    _names.append(socket.socket(socket.AF_UNIX))
    _names[-1].bind(f"\0{name}")
    _names[-1].listen()


def try_everything(path: str, urls: list[str]) -> list[tuple[str, str, bool, str]]:
    """Bring frames that would make the file `path`; return how each attempt ended."""
    frames = b"".join(make(path) for make in attacker.CVES.values())
    ways = itertools.product(urls, ("plain", "tls"), (False, True))
    return [(*way, _attempt(*way, frames)) for way in ways]


def _attempt(url: str, way: str, secured: bool, frames: bytes) -> str:
    """Say a whole handshake and what follows it, without waiting."""
    wrap = {"plain": _in_the_clear, "tls": _over_tls}[way]
    try:
        with contextlib.closing(attacker.dial(url)) as raw, contextlib.closing(wrap(raw)) as sock:
            sock.sendall(attacker.plain_hello(secured=secured))
            sock.sendall(attacker.rest_of_handshake(secured) + frames)
            sock.shutdown(socket.SHUT_WR)
            received = 0
            while data := sock.recv(1 << 16):
                received += len(data)
            return f"closed after {received} bytes"
    except OSError as error:
        return type(error).__name__


def _in_the_clear(sock: socket.socket) -> socket.socket:
    return sock


def _over_tls(sock: socket.socket) -> socket.socket:
    """Wrap a socket in TLS, as a client without a certificate that accepts any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


def _hello_of_tls() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="w0").do_handshake()
    return outgoing.read()


BEGINNINGS = {
    "leaves": None,
    "silent": b"",
    "half a hello of TLS": b"\x16\x03\x01\x02\x00\x01",
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "a hello of TLS": _hello_of_tls(),
}


def flood(port: int, kind: str, begun: str, stop: str) -> int:
    """Connect as fast as possible until a file is there; return how often.

    Args:
        port: of the worker on this host.
        kind: one of BEGINNINGS.
        begun: path of a file that is made after the first hundred.
        stop: path of the file that ends it.
    """
    beginning, count = BEGINNINGS[kind], 0
    there: deque[socket.socket] = deque()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [sock.close() for sock in there])
        while not (count % 100 == 0 and os.path.exists(stop)):
            sock = socket.socket()
            sock.settimeout(PATIENCE)
            with contextlib.suppress(OSError):
                sock.connect(("127.0.0.1", port))
                if beginning:
                    sock.sendall(beginning)
            there.append(sock)
            if beginning is None or len(there) > 100:
                there.popleft().close()
            count += 1
            if count == 100:
                Path(begun).touch()
    return count
