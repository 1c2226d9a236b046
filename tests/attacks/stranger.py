"""A program: a user of the machine without any credential tries to get in, in every way it knows.

    python stranger.py PATH URL...

Every way brings frames that would make the file PATH. Prints what became of each, as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]

import attacker  # noqa: E402


def in_the_clear(sock: socket.socket) -> socket.socket:
    return sock


def over_tls(sock: socket.socket) -> socket.socket:
    """As a client without a certificate, that takes whatever the server has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


def attack(url: str, way: str, secured: bool, frames: bytes) -> str:
    """Say a whole handshake and what follows it, without waiting; return how it ended."""
    wrap = {"plain": in_the_clear, "tls": over_tls}[way]
    try:
        with contextlib.closing(attacker.dial(url)) as raw, contextlib.closing(wrap(raw)) as sock:
            sock.sendall(attacker.plain_hello(secured=secured))
            sock.sendall(attacker.rest_of_handshake(secured) + frames)
            received = 0
            while data := sock.recv(1 << 16):
                received += len(data)
            return f"closed after {received} bytes"
    except OSError as error:
        return type(error).__name__


def main(path: str, urls: list[str]) -> None:
    frames = b"".join(make(path) for make in attacker.CVES.values())
    ways = itertools.product(urls, ("plain", "tls"), (False, True))
    print(json.dumps([(*way, attack(*way, frames)) for way in ways]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
