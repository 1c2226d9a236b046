"""Steps of a process of the same user without the secret, at the addresses of a dead worker.

Its knowledge of farcall's insides is in `attacker.py`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import attacker

_PAUSE = threading.Event()  # of slow ones; never set
Worker = tuple[str, int, int]  # name, id and incarnation, as the store has them


def _say_nothing(sock: socket.socket, worker: Worker, urls: list[str]) -> None:
    _PAUSE.wait()


def _lie(sock: socket.socket, worker: Worker, urls: list[str]) -> None:
    """Say that it is the worker, without having listened."""
    name, number, incarnation = worker
    hello = {"name": name, "id": number, "incarnation": incarnation, "addresses": tuple(urls)}
    sock.sendall(attacker.plain_hello(secured=True, **hello))
    _PAUSE.wait()


def _refuse(sock: socket.socket, worker: Worker, urls: list[str]) -> None:
    sock.sendall(attacker.refusal("you are not wanted", "link"))
    _PAUSE.wait()


def _doubt(sock: socket.socket, worker: Worker, urls: list[str]) -> None:
    sock.sendall(attacker.refusal("you have another secret", "authentication"))
    _PAUSE.wait()


def _dribble(sock: socket.socket, worker: Worker, urls: list[str]) -> None:
    for byte in attacker.refusal("n" * 1000, "link"):
        sock.sendall(bytes([byte]))
        _PAUSE.wait(0.05)


def _hang_up(sock: socket.socket, worker: Worker, urls: list[str]) -> None:
    sock.close()


KINDS: dict[str, Callable[[socket.socket, Worker, list[str]], None]] = {
    "says nothing": _say_nothing,
    "says that it is the worker": _lie,
    "refuses": _refuse,
    "denies the secret": _doubt,
    "refuses byte by byte": _dribble,
    "hangs up": _hang_up,
}

_listeners: list[socket.socket] = []


def take(urls: list[str], worker: Worker, kind: str) -> int:
    """Listen at all addresses of a worker that died, from now on; return at how many."""
    for url in urls:
        if url.startswith("unix:@"):
            _listeners.append(socket.socket(socket.AF_UNIX))
            _listeners[-1].bind("\0" + url.removeprefix("unix:@"))
            _listeners[-1].listen(512)
        else:
            place = urlsplit(url)
            _listeners.append(socket.create_server((place.hostname, place.port), backlog=512))
        accept = threading.Thread(target=_serve, args=(_listeners[-1], worker, urls, kind))
        accept.daemon = True
        accept.start()
    return len(_listeners)


def _serve(listener: socket.socket, worker: Worker, urls: list[str], kind: str) -> None:
    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            KINDS[kind](sock, worker, urls)

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=answer, args=(sock,), daemon=True).start()
