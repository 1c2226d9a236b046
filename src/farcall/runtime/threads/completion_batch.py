"""Threads stand back while the leader completes a batch of futures."""

from __future__ import annotations

from farcall.runtime.threads.bell import Bell

STAND_BACK = 0.005  # seconds


class CompletionBatch:
    """The state of the leader's batch: on while it completes futures, one after the other.

    torch lets go of the GIL whenever a future is completed. A thread that makes one call after the
    other, or waits for one future after the other, would take it each time. That costs more than
    all the rest of a call, so such threads stand back.

    The end is told by a bell, and not by a `threading.Event`: Ctrl-C in the main thread may leave
    the lock of an event held, and the leader would wait for it forever.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._ends = Bell()

    def begin(self) -> None:
        """Say that a batch begins."""
        self._ends = Bell()
        self.is_on = True

    def end(self) -> None:
        """Say that the batch has ended. No effect if there is none."""
        if self.is_on:
            self.is_on = False
            self._ends.ring()

    def yield_to(self) -> None:
        """Wait for the end of the batch, but not for long."""
        if not self._ends.wait(STAND_BACK):
            self.end()
