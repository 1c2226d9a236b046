"""One backward pass at one worker, as a pure state machine.

A *source* is where gradients enter this worker's part of the graph: the roots, or tensors that it
sent (a send). A *receive* is where they leave it: tensors that it received. Sources are numbered in
the order in which they were sent, receives are whatever the caller uses to name them.

A wave of PREPARE finds out which sends the roots reach, where that must be known:

    reach(source, part, parts)  a part of a source is live and reaches these parts of receives, as
                                the first: send PREPARE for them
    prepared(part)              that PREPARE was answered: what is answered by it

What is sent or received in one message are several tensors, not all of which need be used; those
that are reached at once are a part. A PREPARE is answered when all that it caused are answered, so
the answer at the root means that the wave is over everywhere. Then all live sources are known
(`begin`).

The wave of GRAD computes:

    arrive(source, share)       its gradient is here, with a share of the pass: a run for it begins
    send(source, last)          its run has the gradient of a receive: the share that goes with it
    ran(source)                 its run is over: the share to give back to the root, if one is left

The pass is over when nobody has a share of it. The root begins with all of it; who sends a gradient
gives away half of what it has, or, as the last thing it does, all; who has nothing to send gives it
back to the root (BWD-3). So a chain of workers needs no answers. Every share is 2**-n of the pass,
and is written as n. (F. Mattern, "Global quiescence detection based on credit distribution and
recovery", 1989.)

The caller runs nodes such that every receive gets its whole gradient, once (BWD-2). It may wait for
the gradients of the sources in descending order: what a source's gradient depends on at this worker
was sent after it, so cycles between workers can't block.

Not thread-safe: whoever owns it holds one lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

ROOT = (1 << 40) - 1  # the roots at the worker that began the pass: above the numbers of all sends


class UnexpectedGradient(Exception):
    """A gradient came for a source that is not live, or a second one."""


WHOLE = 0  # the share that is all of a pass


class Returned:
    """At the root: the shares that nobody works on any more. Adds them up as binary numbers."""

    def __init__(self) -> None:
        self._shares: set[int] = set()

    def add(self, share: int) -> bool:
        """A share came back. True: that was the last one, the pass is over everywhere."""
        while share in self._shares:
            self._shares.remove(share)
            share -= 1
        self._shares.add(share)
        return share == WHOLE


class Backward:
    """See the module's description."""

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._causes: dict[Hashable, Hashable] = {}  # PREPARE that was sent -> what caused it
        self._waiting: dict[Hashable, int] = {}  # PREPARE that came -> how many it waits for
        self._pending: set[int] = set()
        self._arrived: set[int] = set()
        self._shares: dict[int, int] = {}  # of sources that run, and have not given theirs away
        self._running = 0
        self.has_begun = False

    @property
    def missing(self) -> int:
        """How many live sources have no gradient yet."""
        return len(self._pending)

    @property
    def runs_last(self) -> bool:
        """Whether the run that goes on is the last one of this worker."""
        return self.has_begun and not self._pending and self._running == 1

    # PREPARE.

    def reach(self, source: int, part: Hashable, parts: Iterable[Hashable]) -> None:
        """A part of a source is live, and is first to reach these parts of receives."""
        self._live.add(source)
        for reached in parts:
            self._causes[reached] = part
            self._waiting[part] = self._waiting.get(part, 0) + 1

    def prepared(self, reached: Hashable) -> Hashable | None:
        """The PREPARE for a part of a receive was answered: the part whose own is answered now."""
        part = self._causes.pop(reached)
        self._waiting[part] -= 1
        if self._waiting[part]:
            return None
        del self._waiting[part]
        return part

    # GRAD.

    def begin(self) -> list[int]:
        """All live sources are known: which they are, in descending order."""
        self.has_begun = True
        self._pending = set(self._live)
        return sorted(self._live, reverse=True)

    def arrive(self, source: int, share: int) -> None:
        """The gradient of a source is here, and a share of the pass.

        Raises:
            UnexpectedGradient: the source is not live, or has its gradient already.
        """
        if source in self._arrived or (self.has_begun and source not in self._pending):
            raise UnexpectedGradient(source)
        self._arrived.add(source)
        self._pending.discard(source)
        self._shares[source] = share
        self._running += 1

    def send(self, source: int, last: bool = False) -> int:
        """The run of a source has the gradient of a receive: the share that goes with it.

        With `last`, nothing is left to do for the source.
        """
        if last:
            return self._shares.pop(source)
        self._shares[source] += 1
        return self._shares[source]

    def ran(self, source: int) -> int | None:
        """The run of a source is over: the share to give back. None: it went with a gradient."""
        self._running -= 1
        return self._shares.pop(source, None)
