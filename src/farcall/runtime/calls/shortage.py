"""A lack of threads for calls: the callers are told, and their timeouts say so."""

from __future__ import annotations

import contextlib
import math
import time

from farcall.errors import LinkError
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.peers import Peer
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor
from farcall.wire.frames import Frame
from farcall.wire.messages import Crowded

TELL_AGAIN = 1.0  # seconds between two messages about a want of threads
COUNTS_FOR = 10.0  # seconds for which it counts that a peer said it had no more threads


class Shortage:
    """The known shortages of one agent and its peers. Thread-safe."""

    def __init__(self, status: Status, executor: Executor, directory: Directory) -> None:
        self._status = status
        self._executor = executor
        self._directory = directory
        self._told = -math.inf

    def tell(self) -> None:
        """Tell the callers of this worker that it has no more threads for their calls."""
        now = time.monotonic()
        if now < self._told + TELL_AGAIN:
            return
        self._told = now
        message = Crowded(self._executor.shortage())
        for peer in self._directory.live():
            link = peer.back_link
            if link is None or not len(peer.incoming) or peer.worker is self._status.me:
                continue
            with contextlib.suppress(LinkError, TimeoutError):
                link.send(Frame(message), now)

    def describe(self, peer: Peer | None = None) -> str:
        """Return, for timeouts, which worker lately had functions queue for threads.

        Nested calls need a thread for each function that waits, here or at the peer.

        Args:
            peer: the callee of the call that timed out.
        """
        parts = []
        why = self._executor.shortage()
        if why:
            parts.append((self._status.me.name, why))
        if peer is not None and time.monotonic() < peer.crowded_at + COUNTS_FOR:
            parts.append((peer.name, peer.crowded))
        return "".join(
            f"; calls queue for a thread at worker {name!r}: {why}" for name, why in parts
        )
