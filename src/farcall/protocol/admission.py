"""Decide which requests of one peer may run, and whether more of them are read.

These rules keep one caller from exhausting the worker. A caller that does not read its answers, or
that sends requests faster than their functions run, must not take the other callers' threads, nor
all of the memory.

*Answers.* Answers that can't be sent at once wait in an outbox (`outbox`). While `most` bytes or
more wait there, no function of the caller's requests begins.

    state   event                    next    effect
    ------  -----------------------  ------  ---------------------------------------------
    OPEN    begin                    OPEN    the call runs
    OPEN    waits, less than `most`  OPEN
    OPEN    waits, `most` or more    SHUT
    SHUT    begin                    SHUT    the call is held
    SHUT    waits                    SHUT
    SHUT    went, `most` or more     SHUT
    SHUT    went, less than `most`   OPEN    every call that is held comes out, to begin again
    any     lost                     LOST    every call that is held comes out, to be ended
    LOST    begin                    LOST    the call runs: it finds that its caller is lost

*Requests.* Requests whose functions have not begun are queued. When the queue exceeds a bound in
requests or in bytes, the link of these requests is not read until the queue has shrunk to half of
each bound. That holds up the caller, and not the queued functions. But if the queued functions
can't run for want of threads, the functions that have the threads may be waiting for a frame that
is not read yet: a nested call, or a message about a reference. Then the bounds grow, and as much
again is read.

    state   event                                  next    effect
    ------  -------------------------------------  ------  -----------------------------------
    READS   queued, up to the bounds               READS
    READS   queued, beyond a bound                 PAUSED  the link is not read
    PAUSED  queued (it was read before)            PAUSED
    PAUSED  begun, more than half of a bound left  PAUSED
    PAUSED  begun, half of both bounds left        READS   the bounds are the first ones again
    PAUSED  stuck: there are no threads            READS   the bounds grow by the queue's size
    READS   begun, half of both bounds left        READS   the bounds are the first ones again
    READS   stuck                                  READS
    any     lost                                   READS   for the rest of its life

Invariants (tests cite them):

ADM-1  A call that is held comes out exactly once, by `went` or `take_all`, in the order of `begin`.
ADM-2  While `most` bytes or more wait, no call begins, unless the peer is lost.
ADM-3  While less than `most` bytes wait, or the peer is lost, no call is held.
ADM-4  While more is queued than a bound allows, the link is not read, unless the peer is lost.
ADM-5  While no more is queued than half of both bounds, the link is read.
ADM-6  After `stuck` the link is read until more requests have come.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

Served = TypeVar("Served")

MAX_IN_FLIGHT_BYTES = 64 << 20
MAX_QUEUED_REQUESTS = 1 << 16
MAX_QUEUED_BYTES = 256 << 20


class Bounds(NamedTuple):
    """Bounds on calls that wait for one peer, and on calls of it that are queued here.

    Attributes:
        in_flight_bytes: of requests, and of answers, that wait to be sent.
        queued_requests: that have arrived and have not begun to run.
        queued_bytes: of these.
    """

    in_flight_bytes: int = MAX_IN_FLIGHT_BYTES
    queued_requests: int = MAX_QUEUED_REQUESTS
    queued_bytes: int = MAX_QUEUED_BYTES


class Admission(Generic[Served]):
    """For one peer. The owner holds a lock around everything.

    Args:
        bounds: calls are held from `in_flight_bytes` of waiting answers on. 0 is as 1: while
            nothing waits, nothing is held.

    Attributes:
        waiting_bytes: of answers that wait.
        queued: requests that are queued.
        queued_bytes: of these.
        reads: whether the link that requests come by is to be read.
    """

    __slots__ = (
        "_bounds",
        "_held",
        "_is_lost",
        "_most",
        "_most_bytes",
        "_most_requests",
        "queued",
        "queued_bytes",
        "reads",
        "waiting_bytes",
    )

    def __init__(self, bounds: Bounds = Bounds()) -> None:  # noqa: B008  # it is immutable
        self._bounds = bounds
        self._most = max(1, bounds.in_flight_bytes)
        self._most_requests = bounds.queued_requests
        self._most_bytes = bounds.queued_bytes
        self._held: deque[Served] = deque()
        self._is_lost = False
        self.waiting_bytes = 0
        self.queued = 0
        self.queued_bytes = 0
        self.reads = True

    def begin(self, call: Served) -> bool:
        """Return whether a call that is about to run may; if not, it is held."""
        if self.waiting_bytes < self._most or self._is_lost:
            return True
        self._held.append(call)
        return False

    def waits(self, size: int) -> None:
        """Count an answer of so many bytes that waits from now on."""
        self.waiting_bytes += size

    def went(self, size: int) -> list[Served]:
        """Count an answer out that is sent, or will not be. Returns calls to begin again."""
        self.waiting_bytes -= size
        return self._release() if self.waiting_bytes < self._most else []

    def take_all(self) -> list[Served]:
        """Hold no more, since the peer is gone, and return the calls that were held."""
        self._is_lost = self.reads = True
        return self._release()

    def queue(self, size: int) -> None:
        """Count a request of so many bytes that has arrived and can't run yet."""
        self.queued += 1
        self.queued_bytes += size
        if self.queued > self._most_requests or self.queued_bytes > self._most_bytes:
            self.reads = self._is_lost

    def begun(self, size: int) -> None:
        """Count a queued request out, which begins to run or to be refused."""
        self.queued -= 1
        self.queued_bytes -= size
        _, most, most_bytes = self._bounds
        if self.queued <= most // 2 and self.queued_bytes <= most_bytes // 2:
            self.reads = True
            self._most_requests, self._most_bytes = most, most_bytes

    def stuck(self) -> None:
        """Hear that no request that is queued can run for want of threads."""
        if not self.reads:
            self.reads = True
            self._most_requests += self.queued
            self._most_bytes += self.queued_bytes

    def _release(self) -> list[Served]:
        held = list(self._held)
        self._held.clear()
        return held

    def __len__(self) -> int:
        """Return how many calls are held."""
        return len(self._held)
