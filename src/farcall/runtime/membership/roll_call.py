"""Learns which workers are there: asks the store, and workers without a link whether they live."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.log import get_logger
from farcall.runtime.context import waiting
from farcall.runtime.membership.directory import Directory, Find
from farcall.runtime.membership.links import Links
from farcall.runtime.membership.lookup import NotAsked
from farcall.runtime.membership.losses import Losses
from farcall.runtime.membership.peers import Peer
from farcall.transport.base import Endpoint
from farcall.transport.brief_threads import BriefThreads

logger = get_logger("farcall")

MOST_ASKED = 8  # workers that are asked at once whether they are there
PIECE = 0.5  # seconds of one attempt to reach a worker that does not answer

Everybody = Callable[[float], Sequence[Worker]]  # up to a deadline; raises `NotAsked`


class RollCall:
    """Learns which workers are in an agent's group. Thread-safe.

    Args:
        name: of this worker.
        everybody: asks the store for all workers; None: all are known (a group of fixed size).
        find: likewise, for one.
        endpoint: can ask whether a worker is gone.
        directory: learns the results.
    """

    def __init__(
        self,
        name: str,
        everybody: Everybody | None,
        find: Find | None,
        endpoint: Endpoint,
        directory: Directory,
        links: Links,
        losses: Losses,
    ) -> None:
        self._name = name
        self._everybody = everybody
        self._find = find
        self._endpoint = endpoint
        self._directory = directory
        self._links = links
        self._losses = losses
        self._threads = BriefThreads(f"farcall-roll-call-{name}", MOST_ASKED)
        self._lock = threading.Lock()
        self._watched: set[int] = set()  # incarnations to which a link is being made

    @property
    def is_open(self) -> bool:
        """Return whether there may be workers that are not known here."""
        return self._everybody is not None

    def ask_store(self, deadline: float) -> str:
        """Learn of all workers that the store knows.

        Args:
            deadline: `time.monotonic()` seconds.

        Returns:
            Why the store could not be asked; "" if it was.
        """
        if self._everybody is None:
            return ""
        try:
            with waiting():
                found = self._everybody(deadline)
        except NotAsked as error:
            logger.debug("%s: the store does not say who is there: %s", self._name, error)
            return str(error)
        for worker in found:
            known = self._directory.newest(worker.incarnation)
            if known is None or not known.worker.addresses:
                self._directory.add(worker)
        return ""

    def weed(self, peers: Iterable[Peer], deadline: float) -> None:
        """Lose the workers that are gone, of those without a link. Waits for the answers.

        Args:
            deadline: `time.monotonic()` seconds; a worker that has not answered by then stays.
        """
        doubtful = [peer for peer in peers if not self._has_link(peer)]
        open_questions = threading.Semaphore(0)

        def ask(peer: Peer) -> None:
            try:
                if self._endpoint.is_gone(peer.worker, deadline):
                    self.note_goodbye(peer)
                    self._losses.declare_lost(peer, "it is not at its addresses any more")
            finally:
                open_questions.release()

        with waiting():
            for peer in doubtful:
                self._threads.run(partial(ask, peer))
            for _ in doubtful:
                if not open_questions.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    return

    def watch(self, peers: Iterable[Peer]) -> bool:
        """Have links made to workers, so that their deaths are noticed. Does not wait for that.

        Returns:
            Whether there is a link to each.
        """
        missing = [peer for peer in peers if not self._has_link(peer)]
        for peer in missing:
            with self._lock:
                if peer.incarnation in self._watched:
                    continue
                self._watched.add(peer.incarnation)
            if not self._threads.run(partial(self._watch, peer), needed=False):
                self._watched.discard(peer.incarnation)
        return not missing

    def _watch(self, peer: Peer) -> None:
        try:
            self._links.connect(peer, time.monotonic() + PIECE)
        except TimeoutError:
            pass  # it is asked again
        except LinkError as error:
            self.note_goodbye(peer)
            self._losses.unreachable(peer, error)
        finally:
            with self._lock:
                self._watched.discard(peer.incarnation)

    def note_goodbye(self, peer: Peer) -> None:
        """Note that a worker has left, if it said no goodbye here but took its record away.

        Waits for the store, for half a second at most.
        """
        if self._find is None or peer.left is not None:
            return
        try:
            found = self._find(peer.name, time.monotonic() + PIECE)
        except NotAsked:
            return
        if found is None:
            peer.left = "it has left the group"

    def _has_link(self, peer: Peer) -> bool:
        """Return whether a link tells of its loss: one that there is, or was until a moment ago.

        The end of a link is an event, and may still wait for its turn behind the peer's goodbye.
        """
        return peer.had_link or self._links.linked(peer) is not None

    def close(self) -> None:
        """Ask no more. A question under way ends when the endpoint is closed."""
        self._threads.close(0)
