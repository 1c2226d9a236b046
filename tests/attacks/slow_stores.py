"""Stores in the hands of an attacker that answer slowly, never, or without an end."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hostile_store import HostileStore
from torch.distributed import FileStore

# The first words of torch's client of a TCPStore: "validate" with a magic number, then "ping".
_PING = b"\x0d"
_AFTER_VALIDATE = 5
_PROBE = b"farcall/probe"  # a part of the key of the only question that farcall's own probe asks
_NOT_THERE = b"\x01"

Answers = Callable[[bytes], Iterator[bytes]]


def _nothing(ping: bytes) -> Iterator[bytes]:
    yield from ()


def _ping_alone(ping: bytes) -> Iterator[bytes]:
    yield ping


def _zeros(ping: bytes) -> Iterator[bytes]:
    yield ping
    yield from itertools.repeat(bytes(1 << 16))


def _exabytes(ping: bytes) -> Iterator[bytes]:
    yield ping
    yield from itertools.repeat(b"\xff" * (1 << 16))


def _byte_by_byte(ping: bytes) -> Iterator[bytes]:
    pause = threading.Event()
    for value in itertools.chain(ping, itertools.repeat(0)):
        pause.wait(0.02)
        yield bytes([value])


def _ping_in_bytes(ping: bytes) -> Iterator[bytes]:
    pause = threading.Event()
    for value in ping[:-1]:
        pause.wait(0.02)
        yield bytes([value])


STORES: dict[str, Answers] = {
    "is silent behind the probe": _nothing,
    "answers a part of torch's first question": _ping_in_bytes,
    "is silent behind torch's first question": _ping_alone,
    "answers byte by byte": _byte_by_byte,
    "answers without end": _zeros,
    "announces exabytes": _exabytes,
}


def _serve(sock: socket.socket, kind: str) -> None:
    with sock, contextlib.suppress(OSError):
        said = sock.recv(4096)
        while len(said) <= _AFTER_VALIDATE:
            said += sock.recv(4096)
        if _PROBE in said:
            sock.sendall(_NOT_THERE)
        elif said[_AFTER_VALIDATE : _AFTER_VALIDATE + 1] == _PING:
            for data in STORES[kind](said[_AFTER_VALIDATE + 1 :][:4]):
                sock.sendall(data)
        while sock.recv(4096):
            pass


# Steps.

_kept: list[socket.socket] = []


def serve_store(kind: str) -> int:
    """Listen as a hostile TCPStore of that kind; return the port."""
    server = socket.create_server(("127.0.0.1", 0))
    _kept.append(server)

    def accept() -> None:
        while True:
            sock, _ = server.accept()
            threading.Thread(target=_serve, args=(sock, kind), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


_clones: list[HostileStore] = []


class HeldStore(HostileStore):
    """Answers after a time, or while it is held not at all.

    Args:
        path: of a FileStore below.
        seconds: that each answer takes; None: it does not come while the store is held.
    """

    def __init__(self, path: str, seconds: float | None = None) -> None:
        super().__init__(FileStore(path, -1), lambda _, value: value)
        self._path = path
        self._seconds = seconds
        self.may_answer = threading.Event()

    def _hold(self) -> None:
        self.may_answer.wait(self._seconds)

    def set(self, key: str, value: Any) -> None:
        self._hold()
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self._hold()
        return super().get(key)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._hold()
        return super().compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        self._hold()
        return super().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._hold()
        return super().check(keys)

    def clone(self) -> HeldStore:
        anew = HeldStore(self._path, self._seconds)
        anew.may_answer = self.may_answer
        _clones.append(anew)  # torch keeps the half that is in C++
        return anew


class EndlessLog:
    """Names without end in the log of a group, none of which leads to a record.

    Args:
        names: after so many it has no more, or a test that fails would not end.
    """

    def __init__(self, names: int) -> None:
        self._names = names
        self._is_registered = False
        self.asked = 0

    def __call__(self, key: str, value: bytes) -> bytes:
        head, _, last = key.rpartition("/")
        if last == "members":  # it counts right until the worker has put its name there
            count = b"900000000" if self._is_registered else value
            self._is_registered = True
            return count
        if not head.endswith("/member") or self.asked >= self._names:
            return value
        self.asked += 1
        return f"nobody{last}".encode()
