"""Ports for stores and servers that a test starts later."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port that is free, and that the system gives to no program without a demand."""
    while True:
        port = random.randrange(10000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
