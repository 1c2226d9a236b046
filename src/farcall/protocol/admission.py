"""Which requests of one peer may run while answers to it wait to be sent.

A caller that does not read its answers must cost the others no thread and not all of the memory. So
its answers wait in a box (`outbox.py`), and while as many bytes wait as may, no function of its
requests begins.

    state   event                    next    effect
    ------  -----------------------  ------  ---------------------------------------------
    OPEN    begin                    OPEN    the job runs
    OPEN    waits, less than `most`  OPEN
    OPEN    waits, `most` or more    SHUT
    SHUT    begin                    SHUT    the job is held
    SHUT    waits                    SHUT
    SHUT    went, `most` or more     SHUT
    SHUT    went, less than `most`   OPEN    every job that is held comes out, to begin again
    any     lost                     LOST    every job that is held comes out, to be ended
    LOST    begin                    LOST    the job runs: it finds that its caller is lost

Invariants (tests cite them):

ADM-1  A job that is held comes out exactly once, by `went` or `lost`, in the order of `begin`.
ADM-2  While `most` bytes or more wait, no job begins, unless the peer is lost.
ADM-3  While less than `most` bytes wait, or the peer is lost, no job is held.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Admission(Generic[Job]):
    """For one peer. The owner holds a lock around everything.

    Args:
        most: from how many bytes of waiting answers on jobs are held. 0 is as 1: while nothing
            waits, nothing is held.

    Attributes:
        waiting_bytes: of answers that wait.
    """

    __slots__ = ("_held", "_is_lost", "_most", "waiting_bytes")

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._held: deque[Job] = deque()
        self._is_lost = False
        self.waiting_bytes = 0

    def begin(self, job: Job) -> bool:
        """A job is about to run. False: it is held."""
        if self.waiting_bytes < self._most or self._is_lost:
            return True
        self._held.append(job)
        return False

    def waits(self, size: int) -> None:
        """An answer of so many bytes waits from now on."""
        self.waiting_bytes += size

    def went(self, size: int) -> list[Job]:
        """An answer that waited is sent, or will not be. Returns jobs that shall begin again."""
        self.waiting_bytes -= size
        return self._release() if self.waiting_bytes < self._most else []

    def lost(self) -> list[Job]:
        """The peer is gone. Returns the jobs that were held."""
        self._is_lost = True
        return self._release()

    def _release(self) -> list[Job]:
        held = list(self._held)
        self._held.clear()
        return held

    def __len__(self) -> int:
        """Jobs that are held."""
        return len(self._held)
