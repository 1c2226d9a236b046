"""An attacker between two workers, who reads, changes, drops, repeats, reorders and injects.

A relay knows bytes and no protocol. In a network of `tests/process/networks.py` it sits on the
router, which hands it every connection to the address of one host, whatever the store says.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from networks import Network
from patience import PATIENCE

IP_TRANSPARENT = 19
SIZE = 1 << 16

Change = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, draw: random.Random) -> bytes:
    """Flip a bit behind the first bytes, which may be a length: that would be noticed."""
    at = draw.randrange(len(data) // 2, len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def drop(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + 1 :]


def repeat(data: bytes, draw: random.Random) -> bytes:
    return data + data


def swap(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(1, len(data))
    return data[at:] + data[:at]


CHANGES: dict[str, Change] = {"change": flip, "drop": drop, "repeat": repeat, "reorder": swap}


class Pipe(NamedTuple):
    """One direction of one connection. `forth`: away from the dialler."""

    source: socket.socket
    target: socket.socket
    forth: bool


class Relay:
    """Takes connections at a port and dials on.

    Args:
        port: where to listen, on all interfaces.
        target: where to dial; None: the address that each connection was meant for.
    """

    def __init__(self, port: int, target: tuple[str, int] | None) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._seen = bytearray()
        self._said: list[tuple[tuple[str, int], bytearray]] = []  # target, and what went there
        self._pipes: list[Pipe] = []
        self._armed: dict[bool, tuple[Change, bool]] = {}  # by direction; whether on a stream
        self.changes = 0
        self._draw = random.Random(25)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if target is None:
            self._listener.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
        self._listener.bind(("", port))
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def seen(self) -> bytes:
        """Return all that has come through, in the order in which it came."""
        with self._lock:
            return bytes(self._seen)

    def arm(self, change: str, forth: bool, on_stream: bool) -> None:
        """Change what comes next in that direction; on an extra stream of a link, if so said."""
        with self._lock:
            self._armed[forth] = CHANGES[change], on_stream

    def inject(self, data: bytes, forth: bool) -> int:
        """Put bytes into that direction of all connections; return how many connections."""
        with self._lock:
            pipes = [pipe for pipe in self._pipes if pipe.forth == forth]
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.target.sendall(data)
        return len(pipes)

    def play_again(self) -> None:
        """Dial where others have dialled, and say what they have said, until it is refused."""
        with self._lock:
            said = [(target, bytes(data)) for target, data in self._said]
        for target, data in said:
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection(target, PATIENCE) as sock,
            ):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(SIZE):
                    pass

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            target = self._target or near.getsockname()[:2]
            try:
                far = socket.create_connection(target, PATIENCE)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = bytearray()
            with self._lock:
                self._said.append((target, said))
            for pipe, log in ((Pipe(near, far, True), said), (Pipe(far, near, False), bytearray())):
                threading.Thread(target=self._pump, args=(pipe, log), daemon=True).start()

    def _pump(self, pipe: Pipe, log: bytearray) -> None:
        with self._lock:
            self._pipes.append(pipe)
        try:
            while data := pipe.source.recv(SIZE):
                with self._lock:
                    self._seen += data
                    log += data
                    if self._is_armed_for(pipe) and len(data) > 1:
                        change, _ = self._armed.pop(pipe.forth)
                        data = change(data, self._draw)
                        self.changes += 1
                pipe.target.sendall(data)
        except OSError:
            pass
        with self._lock:
            self._pipes.remove(pipe)
        for sock in (pipe.source, pipe.target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _is_armed_for(self, pipe: Pipe) -> bool:
        """Return whether this pipe is to be changed. A link's own connection is its oldest."""
        _, on_stream = self._armed.get(pipe.forth, (None, None))
        oldest = next((one for one in self._pipes if one.forth == pipe.forth), pipe)
        return on_stream is False or (on_stream is True and pipe is not oldest)


def intercept(net: Network, hosts: Sequence[str]) -> None:
    """Have the router itself take all traffic to these hosts of a network from now on.

    The router's own traffic to them still goes to them: only packets from a wire are diverted.
    """
    for number, wire in enumerate(("to1", "to2")):
        table = str(100 + number)
        for host in hosts:
            address = net.addresses[host]
            if (host == net.a) == (wire == "to1"):
                continue  # it is behind this very wire
            for words in (
                ("route", "add", "local", address, "dev", "lo", "table", table),
                ("rule", "add", "iif", wire, "to", address, "lookup", table, "priority", "1"),
            ):
                subprocess.run(["ip", "-n", net.router, *words], check=True, capture_output=True)


# Steps of the process that is the relay.

_relays: list[Relay] = []


def begin(port: int, target: tuple[str, int] | None = None) -> int:
    """Start this process's relay; return its port."""
    _relays[:] = [Relay(port, target)]
    return _relays[0].port


def arm(change: str, forth: bool, on_stream: bool = False) -> None:
    _relays[0].arm(change, forth, on_stream)


def changes() -> int:
    """Return how many changes were made of those that were armed."""
    return _relays[0].changes


def has_seen(marker: bytes) -> tuple[bool, int]:
    """Return whether the marker came through, and how many bytes did."""
    seen = _relays[0].seen()
    return marker in seen, len(seen)


def inject(data: bytes, forth: bool) -> int:
    return _relays[0].inject(data, forth)


def play_again() -> None:
    _relays[0].play_again()
