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

    arrive(source)              its gradient is here: a run for it begins
    send(source, receive)       its run has the gradient of a receive, which goes to the sender
    ran(source)                 its run is over: whether the source is answered by it
    answered(receive)           that GRAD was answered: whose is answered by it

A source's GRAD is answered when its run, and everything that this caused elsewhere, is done; so the
root's answer means that the pass is over everywhere (BWD-3). No thread waits for it.

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


class Backward:
    """See the module's description."""

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._causes: dict[Hashable, Hashable] = {}  # what was sent -> what caused it
        self._waiting: dict[Hashable, int] = {}  # what came -> what its answer still waits for
        self._pending: set[int] = set()
        self._arrived: set[int] = set()
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

    @property
    def is_over(self) -> bool:
        """Whether nothing of the pass is left at this worker."""
        return self.has_begun and not (self._pending or self._running or self._waiting)

    # PREPARE.

    def reach(self, source: int, part: Hashable, parts: Iterable[Hashable]) -> None:
        """A part of a source is live, and is first to reach these parts of receives."""
        self._live.add(source)
        for reached in parts:
            self._wait(part, reached)

    def prepared(self, reached: Hashable) -> Hashable | None:
        """The PREPARE for a part of a receive was answered: the part whose own is answered now."""
        return self._settle(reached)

    # GRAD.

    def begin(self) -> list[int]:
        """All live sources are known: which they are, in descending order."""
        self.has_begun = True
        self._pending = set(self._live)
        return sorted(self._live, reverse=True)

    def arrive(self, source: int) -> None:
        """The gradient of a source is here.

        Raises:
            UnexpectedGradient: the source is not live, or has its gradient already.
        """
        if source in self._arrived or (self.has_begun and source not in self._pending):
            raise UnexpectedGradient(source)
        self._arrived.add(source)
        self._pending.discard(source)
        self._running += 1
        self._waiting[source] = 1

    def send(self, source: int, receive: Hashable) -> None:
        """The run of a source completed the gradient of a receive."""
        self._wait(source, receive)

    def ran(self, source: int) -> bool:
        """The run of a source is over. True: answer its GRAD now."""
        self._running -= 1
        return self._count_down(source)

    def answered(self, receive: Hashable) -> Hashable | None:
        """The GRAD of a receive was answered: the source whose own is answered now."""
        return self._settle(receive)

    def _wait(self, came: Hashable, sent: Hashable) -> None:
        self._causes[sent] = came
        self._waiting[came] = self._waiting.get(came, 0) + 1

    def _settle(self, sent: Hashable) -> Hashable | None:
        came = self._causes.pop(sent)
        return came if self._count_down(came) else None

    def _count_down(self, came: Hashable) -> bool:
        self._waiting[came] -= 1
        if self._waiting[came]:
            return False
        del self._waiting[came]
        return True
