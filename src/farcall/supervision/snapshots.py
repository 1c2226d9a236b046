"""The snapshots that one worker keeps, for all of its threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from farcall.protocol.succession import Edition, KeptSnapshots, Number, Term


class Snapshots:
    """The snapshots that one worker keeps, by supervision and child. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: KeptSnapshots[Any] = KeptSnapshots()

    def put(self, key: int, child: int, number: Number, state: Any) -> None:
        """Keep a snapshot, unless there is one that counts more."""
        with self._lock:
            dropped = self._kept.put(key, child, number, state)
        del dropped  # its destructor does not run under the lock

    def get(self, key: int, child: int) -> tuple[Number, Any] | None:
        """Return the snapshot of a child that counts, with its number."""
        with self._lock:
            return self._kept.get(key, child)

    def take_over(self, key: int, term: Term, editions: Sequence[Edition]) -> None:
        """Number the snapshots of a supervision anew: this worker supervises from now on."""
        with self._lock:
            self._kept.take_over(key, term, editions)

    def discard(self, key: int) -> None:
        """Drop all snapshots of a supervision."""
        with self._lock:
            dropped = self._kept.discard(key)
        del dropped
