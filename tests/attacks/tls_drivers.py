"""Plays the scripts of `tls_scripts.py` over sockets, as processes of an attacker do."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
from pathlib import Path

from patience import PATIENCE
from tls_scripts import CLIENTS, DEAF, HANGS_UP, SERVERS, SLOW, WAIT, Peer, Script

PAUSE_MS = 20  # between two bytes of a slow one


def play(
    sock: socket.socket, name: str, script: Script, beginning: bytes = b"", knock: int = 0
) -> None:
    """Play a script until it or the peer ends the connection.

    Args:
        beginning: bytes before the script.
        knock: how many bytes the peer says before TLS.
    """
    sock.settimeout(PATIENCE)
    peer = Peer()
    with contextlib.suppress(ConnectionError):
        if knock and len(sock.recv(knock, socket.MSG_WAITALL)) < knock:
            return
        sock.sendall(beginning)
        for data in script(peer):
            if data == WAIT:
                if not _hear(sock, peer):
                    return
                continue
            sock.sendall(data)
            if name in SLOW and _is_ended(sock, PAUSE_MS):
                return
            if name not in DEAF and _is_readable(sock) and not _hear(sock, peer):
                return
        if name in HANGS_UP:
            return
        if name in DEAF:
            _is_ended(sock, int(PATIENCE * 1000))
            return
        while _hear(sock, peer):
            pass


def _hear(sock: socket.socket, peer: Peer) -> bool:
    data = sock.recv(1 << 16)
    peer.heard += data
    return bool(data)


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _is_ended(sock: socket.socket, milliseconds: int) -> bool:
    """Wait until the peer has closed; return whether it has."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(milliseconds))


# Steps.


def attack_without_end(port: int, beginning: bytes, begun: str, stop: str) -> dict[str, int]:
    """Have a client of each kind connect again and again; return how often each has.

    Args:
        port: of the worker on this host.
        beginning: bytes that each says first.
        begun: path of a file that is made when each kind has connected.
        stop: path of the file that ends it.
    """
    counts = dict.fromkeys(CLIENTS, 0)

    def run(number: int, name: str) -> None:
        while not os.path.exists(stop):
            with socket.socket() as sock:
                sock.bind((f"127.0.2.{1 + number}", 0))
                sock.settimeout(PATIENCE)
                with contextlib.suppress(OSError):
                    sock.connect(("127.0.0.1", port))
                    counts[name] += 1
                    play(sock, name, CLIENTS[name], beginning)
            if all(counts.values()):
                Path(begun).touch()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


_accepted: dict[str, int] = {}
_kept: list[socket.socket] = []


def serve_all(knock: int) -> dict[str, int]:
    """Listen as a hostile server of each kind; return their ports.

    Args:
        knock: how many bytes a dialler says before TLS.
    """
    ports = {}
    for name in SERVERS:
        server = socket.create_server(("127.0.0.1", 0))
        _kept.append(server)
        ports[name] = server.getsockname()[1]
        _accepted[name] = 0
        threading.Thread(target=_accept, args=(server, name, knock), daemon=True).start()
    return ports


def _accept(server: socket.socket, name: str, knock: int) -> None:
    for number in itertools.count(1):
        sock, _ = server.accept()
        _accepted[name] = number
        threading.Thread(target=_serve, args=(sock, name, knock), daemon=True).start()


def _serve(sock: socket.socket, name: str, knock: int) -> None:
    with sock:
        play(sock, name, SERVERS[name], knock=knock)


def accepted() -> dict[str, int]:
    """Return how often each server was connected to."""
    return _accepted
