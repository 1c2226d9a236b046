"""Hosts that went dark: switched off, or cut off, while a connection to them is open.

A dead process closes its connections. A dead host says nothing, and TCP by itself goes on sending
for some 15 minutes. Three things limit that to a bound in seconds (`Listening.dead_host_timeout`):

- Keepalive, of connections over which nothing is under way (`limit`).
- `TCP_USER_TIMEOUT`, while a connection is dialled and during its handshake (`limit`).
- `HostWatch`, for the rest of its life: a thread that asks the kernel every tenth of the bound
  which connections have something unacknowledged, and since when the peer's kernel is silent.

`TCP_USER_TIMEOUT` is no help to a connection in use: Linux counts the time that a peer does not
read as well, although its kernel answers each probe. A worker that is stopped, or busy for longer
than the bound while large tensors are on their way to it, would be taken for dead. A kernel that
answers keeps a connection alive here, whatever its processes do. See
`docs/decisions/0003-dark-hosts.md`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from farcall.log import get_logger
from farcall.threads import FarcallThread
from farcall.transport.connect import addresses

logger = get_logger("farcall.transport")

DEFAULT_SECONDS = 30.0

_TICKS = 10  # looks in the time of the bound
_SILENT_TICKS = 8  # so that, with a look before and one after, it is no more than the bound
_SKIPPED_TICKS = 3  # after so long a gap this process was stopped, or its machine slept

_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, of Linux 6.15
_RTO_MAX_LIMITS = 1000, 120_000
# The beginning of `struct tcp_info`: eight small numbers, then counts and times of 32 bits.
_TCP_INFO = struct.Struct("@8B13I")
_PROBES, _UNACKED, _LAST_ACK_MS = 3, 12, 20

L = TypeVar("L")


def limit(sock: socket.socket, bound: float) -> None:
    """Limit how long a connection that begins waits for its host. Before it is dialled, if it is.

    Args:
        sock: a TCP socket.
        bound: seconds; 0 leaves the system's own limits.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not bound:
        return
    idle = max(1, int(bound / 2))
    interval = max(1, int((bound - idle) / 3))
    probes = max(1, int((bound - idle) / interval))
    for option, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", int(bound * 1000)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if sys.platform == "linux":
        # Else the kernel asks a peer that does not read every two minutes in the end.
        least, most = _RTO_MAX_LIMITS
        between = max(least, min(int(bound * 1000 / _TICKS), most))
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, between)


class _Connection(NamedTuple):
    """A descriptor that belongs to a link, and how to tell whether it is still the same socket."""

    fd: int
    ours: Any
    theirs: Any


class _Watched:
    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        self.silent_since: float | None = None  # None while nothing is unacknowledged

    def look(self, now: float) -> float:
        """Return for how many seconds the peer's kernel has owed an answer."""
        state = _ask(self.connection)
        if state is None or not state.waits:
            self.silent_since = None
            return 0.0
        since = now if self.silent_since is None else self.silent_since
        self.silent_since = max(since, now - state.last_ack)
        return now - self.silent_since


class _State(NamedTuple):
    waits: bool  # something that was sent, or a probe, is not acknowledged
    last_ack: float  # seconds ago


def _ask(connection: _Connection) -> _State | None:
    """Return the kernel's state of a connection; None if it has ended."""
    try:
        sock = socket.socket(fileno=connection.fd)
    except OSError:
        return None
    try:
        # Another thread may have closed it, and the number may be another socket's by now.
        if (sock.getsockname(), sock.getpeername()) != (connection.ours, connection.theirs):
            return None
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    finally:
        sock.detach()  # it is the link's
    if len(info) < _TCP_INFO.size:
        return None
    fields = _TCP_INFO.unpack(info)
    return _State(bool(fields[_UNACKED] or fields[_PROBES]), fields[_LAST_ACK_MS] / 1000)


class HostWatch(Generic[L]):
    """Watches the TCP connections of links to other hosts. Any thread may call anything.

    Its thread starts with the first connection, and sleeps while there is none. It holds no
    descriptors of its own: copies would keep connections open that their links have closed.

    Args:
        name: of this worker, for the thread.
        bound: seconds; 0 watches nothing.
        on_dark: gets a link whose host has been silent for so long, and the cause, in words.
    """

    def __init__(self, name: str, bound: float, on_dark: Callable[[L, str], None]) -> None:
        self._name = name
        self._bound = bound if sys.platform == "linux" else 0.0
        self._on_dark = on_dark
        self._lock = threading.Condition()  # guards the table and the thread
        self._watched: dict[L, list[_Watched]] = {}
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def note(self, sock: socket.socket) -> _Connection | None:
        """Return what `watch` needs of a connection, before its link takes the descriptor.

        Return None if it is not to be watched.
        """
        if not self._bound or addresses.is_unix(sock) or addresses.is_loopback(sock):
            return None
        return _Connection(sock.fileno(), sock.getsockname(), sock.getpeername())

    def watch(self, link: L, connection: _Connection | None) -> None:
        """Watch a connection of a link from now on, until `unwatch`."""
        if connection is None:
            return
        with self._lock:
            refused = self._start() if self._thread is None and not self._closed.is_set() else None
            is_running = self._thread is not None
            if is_running:
                self._watched.setdefault(link, []).append(_Watched(connection))
                self._lock.notify()
        if refused is not None:
            logger.debug("%s: can't watch for dark hosts: %s", self._name, refused)
        if not is_running:
            return  # `TCP_USER_TIMEOUT` goes on
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=connection.fd)
            try:
                if sock.getpeername() == connection.theirs:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            finally:
                sock.detach()

    def _start(self) -> str | None:
        """Start the thread; return why the system gives none. Lock held."""
        thread = FarcallThread(self._run, f"farcall-hosts-{self._name}")
        refused = thread.try_start()
        if refused is None:
            self._thread = thread
        return refused

    def unwatch(self, link: L) -> None:
        """Stop watching a link that has ended."""
        with self._lock:
            self._watched.pop(link, None)

    def _run(self) -> None:
        tick = self._bound / _TICKS
        last = time.monotonic()
        while not self._closed.wait(tick):
            with self._lock:
                while not self._watched and not self._closed.is_set():
                    self._lock.wait()
                watched = [(link, list(ones)) for link, ones in self._watched.items()]
            now = time.monotonic()
            if now - last > _SKIPPED_TICKS * tick:
                # The bytes that were unacknowledged before may be others than now.
                for _, ones in watched:
                    for one in ones:
                        one.silent_since = None
            last = now
            for link, ones in watched:
                if max(one.look(now) for one in ones) >= _SILENT_TICKS * tick:
                    self.unwatch(link)
                    self._on_dark(link, self._cause())

    def _cause(self) -> str:
        return (
            f"its host has not answered for {self._bound:g} s (dead_host_timeout): it is off, or "
            "the network between is cut"
        )

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        with self._lock:
            self._watched.clear()
            self._lock.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
