"""One backward pass at one worker, as a pure state machine.

A *source* is where gradients enter this worker's part of the graph: the roots, or tensors that it
sent (a send). A *sink* is where they leave it: tensors that it received (a receive), or leaves.
Sources are numbered, sinks are whatever the caller uses to name them.

Wave one, PREPARE (smart mode only), finds out which sends the roots reach:

    reach(source, receives)     a source is live and reaches these: whom to send PREPARE
    prepared(receive)           that PREPARE was answered: whose is answered by it

A PREPARE is answered when all that it caused are answered, so the answer at the root means that
the wave is over everywhere.

Wave two, GRAD, computes:

    label(sinks)                the sources that reach each sink
    arrive(source)              its gradient is here: which sinks can be computed now
    ran(source, receives)       they are computed, and GRADs go to the senders of these
    answered(receive)           that GRAD was answered: whose is answered by it

A sink is computed when all sources that reach it have their gradient, by the run of the source that
came last. So each sink is computed once (BWD-2: each live receive sends one GRAD), and gradients
enter a run complete. A source's GRAD is answered when the run that it set off, and everything that
this caused elsewhere, is done; so the root's answer means that the pass is over everywhere (BWD-3).
It waits for no thread, and cycles between workers can't block, since the graph of sends and
receives has none.

Not thread-safe: whoever owns it holds one lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Generic, TypeVar

Sink = TypeVar("Sink")

ROOT = 0  # the source that the roots of the pass are, at the worker that began it


class UnexpectedGradient(Exception):
    """A gradient came for a source that is not live, or a second one."""


class Backward(Generic[Sink]):
    """See the module's description."""

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._reached: set[Sink] = set()
        self._causes: dict[Sink, int] = {}  # whose PREPARE, later whose GRAD, waits for this one
        self._waiting: dict[int, int] = {}  # source -> how many answers its own still waits for
        self._sinks: dict[int, list[Sink]] = {}
        self._missing: dict[Sink, int] = {}  # how many gradients a sink waits for
        self._pending: set[int] = set()
        self._running = 0
        self._labelled = False

    @property
    def live(self) -> frozenset[int]:
        """The sources that take part."""
        return frozenset(self._live)

    @property
    def is_labelled(self) -> bool:
        return self._labelled

    @property
    def missing(self) -> int:
        """How many live sources have no gradient yet."""
        return len(self._pending)

    @property
    def runs_last(self) -> bool:
        """Whether the run that goes on is the last one of this worker."""
        return self._labelled and not self._pending and self._running == 1

    @property
    def is_over(self) -> bool:
        """Whether nothing of the pass is left at this worker."""
        return self._labelled and not (self._pending or self._running or self._waiting)

    # Wave one.

    def reach(self, source: int, receives: Iterable[Sink]) -> list[Sink]:
        """A source is live: the receives that it is first to reach. None: answer its PREPARE."""
        self._live.add(source)
        new = [receive for receive in receives if receive not in self._reached]
        self._reached.update(new)
        return self._cause(source, new)

    def prepared(self, receive: Sink) -> int | None:
        """The PREPARE for a receive was answered: the source whose own is answered now."""
        return self._settle(receive)

    # Wave two.

    def label(self, sources_of: Mapping[Sink, Collection[int]]) -> None:
        """Which sources reach each sink; they, and those that reach none, are all there are."""
        self._labelled = True
        self._sinks = {source: [] for source in self._live}
        self._pending = set(self._live)
        for sink, sources in sources_of.items():
            self._missing[sink] = len(sources)
            for source in sources:
                self._sinks[source].append(sink)

    def take_all(self, sources: Iterable[int]) -> None:
        """Fast mode: these sources are live, whether or not the roots reach them."""
        self._live.update(sources)

    def arrive(self, source: int) -> list[Sink]:
        """The gradient of a source is here: the sinks to compute now. None: answer its GRAD.

        Raises:
            UnexpectedGradient: the source is not live, or has its gradient already.
        """
        if source not in self._pending:
            raise UnexpectedGradient(source)
        self._pending.discard(source)
        ready = []
        for sink in self._sinks.pop(source):
            self._missing[sink] -= 1
            if not self._missing[sink]:
                ready.append(sink)
        if ready:
            self._running += 1
        return ready

    def ran(self, source: int, receives: Iterable[Sink]) -> list[Sink]:
        """What a source set off is computed: the receives again. None: answer its GRAD."""
        self._running -= 1
        return self._cause(source, list(receives))

    def answered(self, receive: Sink) -> int | None:
        """The GRAD of a receive was answered: the source whose own is answered now."""
        return self._settle(receive)

    def _cause(self, source: int, receives: list[Sink]) -> list[Sink]:
        for receive in receives:
            self._causes[receive] = source
        if receives:
            self._waiting[source] = len(receives)
        return receives

    def _settle(self, receive: Sink) -> int | None:
        source = self._causes.pop(receive)
        self._waiting[source] -= 1
        if self._waiting[source]:
            return None
        del self._waiting[source]
        return source
