"""Looks for workers that were lost, and may be alive: one of two has to dial first."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.log import get_logger
from farcall.runtime.membership.peers import Peer
from farcall.transport.base import Silent
from farcall.transport.brief_threads import BriefThreads

logger = get_logger("farcall")

FIRST_SECONDS = 1.0  # between a loss and the first attempt
MOST_SECONDS = 30.0  # between two attempts
# The worker may live: its host was silent, a credential may be renewed, or the path between the
# two, where an attacker may be, altered the handshake.
PROVES_NOTHING = (TimeoutError, Silent, AuthenticationFailed, BadFrame)


class Search:
    """The lost workers of one agent that may be alive. Thread-safe.

    A thread tries one after the other, each after twice the time of before. It ends when none is
    left to look for: most of the lost are dead, and the first attempt proves it.

    Args:
        name: of this worker.
        reach: tries to make a link, and takes seconds at most. It raises an error of
            `PROVES_NOTHING`, or another LinkError if there is nothing to look for any more.
    """

    def __init__(self, name: str, reach: Callable[[Peer], None]) -> None:
        self._name = name
        self._reach = reach
        self._changed = threading.Condition()  # guards what follows
        self._due: list[tuple[float, int, float, Peer]] = []  # when, a number, the next wait
        self._numbers = itertools.count()
        self._is_at_work = False
        self._closed = False
        self._threads = BriefThreads(f"farcall-search-{name}", 1)

    def begin(self, peer: Peer, *, times_met: int) -> None:
        """Look for a worker from now on.

        Args:
            times_met: how often it was lost and met again before: two that part again and again
                shall do so less and less often.
        """
        self._put(peer, min(FIRST_SECONDS * 2.0**times_met, MOST_SECONDS))
        with self._changed:
            if self._is_at_work or self._closed:
                return
            self._is_at_work = True
        self._threads.run(self._work, needed=False)

    def _put(self, peer: Peer, seconds: float) -> None:
        with self._changed:
            due = time.monotonic() + seconds
            heapq.heappush(self._due, (due, next(self._numbers), seconds, peer))
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._due and not self._closed:
                    wait = self._due[0][0] - time.monotonic()
                    if wait <= 0:
                        break
                    self._changed.wait(wait)
                if self._closed or not self._due:
                    self._is_at_work = False
                    return
                _, _, seconds, peer = heapq.heappop(self._due)
            try:
                self._reach(peer)
            except PROVES_NOTHING as error:
                logger.debug("%s: %r is looked for again: %s", self._name, peer.name, error)
                self._put(peer, min(2 * seconds, MOST_SECONDS))
            except LinkError as error:
                logger.debug("%s: %r is not looked for: %s", self._name, peer.name, error)

    def close(self) -> None:
        """Look for no more. An attempt that goes on ends when the endpoint is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
