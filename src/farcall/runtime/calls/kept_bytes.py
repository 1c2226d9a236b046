"""The bytes of arguments kept for calls of workers that are not known yet."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable

from farcall.errors import RpcTimeout
from farcall.runtime.options.timeouts import ran_too_long
from farcall.runtime.threads.bell import Bell


class KeptBytes:
    """Counts them, by worker. Thread-safe.

    Args:
        most: for one worker. A single call may have more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards what follows
        self._kept: Counter[Hashable] = Counter()
        self._bells: list[Bell] = []  # of those that wait for room

    def take(self, worker: Hashable, size: int) -> Bell | None:
        """Count the arguments of one more call, if there is room.

        Returns:
            A bell that rings when there may be room; None if they are counted.
        """
        with self._lock:
            kept = self._kept[worker]
            if kept and kept + size > self._most:
                bell = Bell()
                self._bells.append(bell)
                return bell
            self._kept[worker] = kept + size
            return None

    def give_back(self, worker: Hashable, size: int) -> None:
        """Hear that the arguments of a call are not kept any more."""
        with self._lock:
            self._kept[worker] -= size
            if not self._kept[worker]:
                del self._kept[worker]
            bells, self._bells = self._bells, []
        for bell in bells:
            bell.ring()

    def refusal(self, worker: Hashable, seconds: float) -> RpcTimeout:
        """Return why a call found no room."""
        return RpcTimeout(
            f"{ran_too_long(seconds)}: {self._kept[worker]} bytes of calls wait until it is known "
            f"where {worker!r} is, and the option max_in_flight_bytes is {self._most}"
        )
