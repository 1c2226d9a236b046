"""Connecting over TCP to a host that may be too busy to take the first attempt.

A listener whose queue is full drops each newcomer, and the system asks again after one second, then
after two more, then after four. Under a flood each question has the same chance, so we ask more
often: by further connections, of which the first that is made is kept.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

AGAIN_SECONDS = 0.1  # to the next connection
MOST = 10  # connections; beyond them the system's own pace will do


def connect(make: Callable[[], socket.socket], address: Any, until: float) -> socket.socket:
    """Return a connection to an address. Blocks the calling thread.

    Args:
        make: returns a socket that is not connected.
        address: as `socket.connect` takes it.
        until: on `time.monotonic()`, in seconds.

    Raises:
        TimeoutError: nothing answers in time.
        OSError: as from `socket.connect`: what the first attempt failed with that failed.
    """
    first = make()
    first.settimeout(min(AGAIN_SECONDS, max(0.001, until - time.monotonic())))
    try:
        first.connect(address)
        return first
    except TimeoutError:
        if time.monotonic() >= until:
            first.close()
            raise
    except BaseException:
        first.close()
        raise
    return _race(first, make, address, until)


def _race(
    first: socket.socket, make: Callable[[], socket.socket], address: Any, until: float
) -> socket.socket:
    """Return the first of several connections that is made, and close the others."""
    racing, winner = {first.fileno(): first}, None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(first, selectors.EVENT_WRITE)
            while winner is None and (left := until - time.monotonic()) > 0:
                if len(racing) < MOST:
                    another = make()
                    racing[another.fileno()] = another
                    another.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        another.connect(address)
                    selector.register(another, selectors.EVENT_WRITE)
                    left = min(left, AGAIN_SECONDS)
                for key, _ in selector.select(left)[:1]:
                    winner = _made(racing[key.fd])
        if winner is None:
            raise TimeoutError("timed out")
        return winner
    finally:
        for sock in racing.values():
            if sock is not winner:
                sock.close()


def _made(sock: socket.socket) -> socket.socket:
    failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failure:
        raise OSError(failure, os.strerror(failure))
    return sock
