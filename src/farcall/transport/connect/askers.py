"""Processes that ask about a worker, and the bounds on their cost.

Over a Unix socket each process of the user may ask, without the secret. So an asker holds no place
that a member needs, and has threads of its own: few, and few of one process, however many
connections it makes. Where there is no room for a new asker, the oldest one is cut off: an asker
that reads and writes at once is done before that.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import NamedTuple

from farcall.log import get_logger
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.connect.keys import Keys
from farcall.transport.connect.listening import Answer

logger = get_logger("farcall.transport")

MOST = 16
MOST_OF_ORIGIN = 4


class _Asker(NamedTuple):
    sock: socket.socket
    keys: Keys | None
    origin: str


class Askers:
    """All of one worker. Thread-safe.

    Args:
        name: of the worker, for its threads.
        answer: see `Listening`.
    """

    def __init__(self, name: str, answer: Answer) -> None:
        self._name = name
        self._answer = answer
        self._threads = BriefThreads(f"farcall-answer-{name}", MOST)
        self._lock = threading.Lock()  # guards what follows
        self._served: dict[socket.socket, _Asker] = {}  # the oldest first
        self._waiting: dict[str, _Asker] = {}  # by origin: the newest of each
        self._closed = False

    def take(self, sock: socket.socket, keys: Keys | None, origin: str) -> None:
        """Have an asker answered, and its connection closed then. Does not wait.

        Args:
            sock: of the connection, whose handshake is done.
            keys: of its records; None: there are none.
            origin: the process, or the host, at its other end.
        """
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._add(_Asker(sock, keys, origin))
            if self._next_origin() is None:
                self._cut_oldest(origin)
                return
        if not self._threads.run(self._work, needed=False):
            self._drop_waiting()  # the system has no thread for them, or the worker has shut down

    def _add(self, asker: _Asker) -> None:
        former = self._waiting.pop(asker.origin, None)
        if former is None and len(self._waiting) >= MOST:
            former = self._waiting.pop(next(iter(self._waiting)))
        if former is not None:
            former.sock.close()
        self._waiting[asker.origin] = asker

    def _next_origin(self) -> str | None:
        """Return the origin whose asker may be served now."""
        if len(self._served) >= MOST:
            return None
        return next((one for one in self._waiting if self._count(one) < MOST_OF_ORIGIN), None)

    def _count(self, origin: str) -> int:
        return sum(one.origin == origin for one in self._served.values())

    def _cut_oldest(self, origin: str) -> None:
        """End an exchange, so that its thread goes on with another one."""
        some = [one for one in self._served.values() if one.origin == origin]
        if len(some) < MOST_OF_ORIGIN:
            some = list(self._served.values())
        _cut(some[0])

    def _work(self) -> None:
        while (asker := self._begin()) is not None:
            try:
                self._answer(asker.sock, asker.keys)
            except OSError as error:
                logger.debug("%s: %s asked in vain: %s", self._name, asker.origin, error)
            finally:
                self._end(asker)

    def _begin(self) -> _Asker | None:
        with self._lock:
            origin = self._next_origin()
            if origin is None:
                return None
            asker = self._waiting.pop(origin)
            self._served[asker.sock] = asker
            return asker

    def _end(self, asker: _Asker) -> None:
        with self._lock:  # the socket is not shut down any more once it may be closed
            del self._served[asker.sock]
        asker.sock.close()

    def _drop_waiting(self) -> None:
        with self._lock:
            dropped = list(self._waiting.values())
            self._waiting.clear()
        for one in dropped:
            one.sock.close()

    def close(self) -> None:
        """Take no more, and wait for the end of those that there are, which are cut off."""
        with self._lock:
            self._closed = True
            for one in self._served.values():
                _cut(one)
        self._drop_waiting()
        self._threads.close()


def _cut(asker: _Asker) -> None:
    with contextlib.suppress(OSError):
        asker.sock.shutdown(socket.SHUT_RDWR)
