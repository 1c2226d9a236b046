"""Versions of farcall, torch and Python that differ between workers: one warning for each pair."""

from __future__ import annotations

import threading

from farcall.log import get_logger
from farcall.transport.connect.handshake_messages import Identity, printable

logger = get_logger("farcall.transport")


class Versions:
    """Compares what peers run with what this worker runs. Thread-safe.

    Args:
        name: of this worker.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._compared: set[int] = set()

    def discard(self, incarnation: int) -> None:
        """Drop all knowledge of a peer that is gone."""
        with self._lock:
            self._compared.discard(incarnation)

    def compare(self, me: Identity, peer: Identity) -> None:
        """Warn if a peer says that it runs other versions; once for each peer."""
        if not me.versions or not peer.versions or me.versions == peer.versions:
            return
        with self._lock:
            if peer.incarnation in self._compared:
                return
            self._compared.add(peer.incarnation)
        logger.warning(
            "%s runs %s, but %s runs %s: what they exchange may mean different things to them",
            self._name,
            me.versions,
            printable(peer.name),
            printable(peer.versions),
        )
