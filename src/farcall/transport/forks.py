"""Connections in processes that are forked from a worker.

A child inherits copies of all descriptors. A connection ends when its last copy is closed, so a
child that lives on would hide the death of its parent from the peers. Python's `os.fork` can be
told to run code in the child; C's `fork`, called by a library, runs none of Python's. So the
compiled part closes the copies (`native/core/forks.hpp`), for both.
"""

from __future__ import annotations

import socket

try:
    from farcall._native import close_in_forked_children as _close_in_forked_children
except ImportError:  # not compiled: only children of `os.fork` close what they inherit
    _close_in_forked_children = None  # type: ignore[assignment]


def keep_from_children(sock: socket.socket) -> None:
    """Close a connection or a listener in every child that is forked from now on.

    Called once for each socket, as soon as it exists. Links that take its descriptor over need not
    do it again.
    """
    if _close_in_forked_children is not None:
        _close_in_forked_children(sock.fileno())
