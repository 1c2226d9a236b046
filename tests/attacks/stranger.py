"""Steps of a process without any credential: it tries to get in, in every way that it knows."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl

import attacker

NOBODY = 65534


def become_nobody() -> int:
    """Become another user of the machine, if this one may; return who this process is."""
    "localhost".encode("idna")  # another user may not read the codecs that are not loaded yet
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return os.geteuid()


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
    """As a client without a certificate, which takes whatever the server has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)
