"""Waits for many sockets at once. Sockets may be changed by any thread while one thread waits."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
from typing import Any

READ = select.EPOLLIN if hasattr(select, "epoll") else selectors.EVENT_READ
# That the peer will send no more. Elsewhere only reading tells.
END = select.EPOLLRDHUP if hasattr(select, "EPOLLRDHUP") else 0
WRITE = select.EPOLLOUT if hasattr(select, "epoll") else selectors.EVENT_WRITE


# A wake-up is something that a wait finds, so that a look without sleeping can't miss it.
WOKEN: tuple[Any, int] = (None, 0)


class _Waker:
    """A socket pair: a byte in one end makes the other readable."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        # Full means that plenty of wake-ups are pending already; closed means no thread waits.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while len(self.reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()


class EpollPoller:
    """On Linux: the kernel keeps the set, changes take effect in a wait that is under way."""

    def __init__(self) -> None:
        self.is_served = False  # whether a thread takes the endpoint's events
        self._epoll = select.epoll()
        self._tokens: dict[int, Any] = {}
        self._waker = _Waker()
        self._epoll.register(self._waker.reader.fileno(), READ)

    def add(self, fd: int, token: Any, mask: int) -> None:
        self._tokens[fd] = token
        self._epoll.register(fd, mask)

    def modify(self, fd: int, mask: int) -> None:
        """Wait for these events on fd from now on; 0 for none (errors are still reported)."""
        try:
            self._epoll.modify(fd, mask)
        except OSError:
            return  # it was removed meanwhile

    def remove(self, fd: int) -> None:
        if self._tokens.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def wait(self, timeout: float | None) -> list[tuple[Any, int]]:
        """Return (token, events) of ready sockets, WOKEN too; empty after `timeout` seconds."""
        tokens = self._tokens
        ready = []
        for fd, events in self._epoll.poll(timeout):
            token = tokens.get(fd)
            if token is not None:
                ready.append((token, events))
            elif fd == self._waker.reader.fileno():
                self._waker.drain()
                ready.append(WOKEN)
        return ready

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._epoll.close()
        self._waker.close()


class SelectorPoller:
    """Anywhere else: `selectors`, woken up for every change."""

    def __init__(self) -> None:
        self.is_served = False  # whether a thread takes the endpoint's events
        self._selector = selectors.DefaultSelector()
        self._waker = _Waker()
        self._selector.register(self._waker.reader, READ, None)
        self._lock = threading.Lock()
        self._changes: dict[int, tuple[Any, int]] = {}
        self._tokens: dict[int, Any] = {}

    def add(self, fd: int, token: Any, mask: int) -> None:
        with self._lock:
            self._tokens[fd] = token
        self.modify(fd, mask)

    def modify(self, fd: int, mask: int) -> None:
        with self._lock:
            if fd in self._tokens:
                self._changes[fd] = (self._tokens[fd], mask & ~END)
        self._waker.wake()

    def remove(self, fd: int) -> None:
        with self._lock:
            if self._tokens.pop(fd, None) is not None:
                self._changes[fd] = (None, 0)
        self._waker.wake()

    def _apply_changes(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, {}
        for fd, (token, mask) in changes.items():
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(fd)
            if mask:
                with contextlib.suppress(KeyError, ValueError, OSError):
                    self._selector.register(fd, mask, token)

    def wait(self, timeout: float | None) -> list[tuple[Any, int]]:
        self._apply_changes()
        ready = []
        for key, events in self._selector.select(timeout):
            if key.data is not None:
                ready.append((key.data, events))
            else:
                self._waker.drain()
                ready.append(WOKEN)
        return ready

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._selector.close()
        self._waker.close()


Poller = EpollPoller | SelectorPoller


def new_poller() -> Poller:
    """Return the best poller of this platform."""
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()
