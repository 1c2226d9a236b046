"""A simulated network: messages between numbered workers, with faults, from one random source.

Nothing happens by itself: `send` puts a message on its way, `deliver` moves the clock to the next
arrival and hands it out. Which message is lost, copied or late is drawn from the `random.Random`
given, so equal seeds and equal calls give equal deliveries.

Two sorts of network come out of `Faults`:

FIFO     no loss, no reordering: each link keeps its order, as TCP does. A cut link holds its
         messages until it is healed.
lossy    messages take any time, in any order; a cut link loses them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from farcall.testing.clock import ManualClock

M = TypeVar("M")

DELAY = 0.001  # seconds: a message takes a half to one and a half of this
SLOW = 20.0  # and a reordered one up to this many times more


@dataclass(frozen=True)
class Faults:
    """Faults, each with a probability from 0 to 1.

    Attributes:
        loss: that a message is lost.
        duplication: that a message arrives twice.
        reordering: that a message is overtaken by many later ones. 0 with no loss: FIFO links.
        crash: that, instead of a step of the program, a worker dies.
        restart: that a dead worker comes back, as a new incarnation.
        partition: that, instead of a step of the program, two workers are cut off each other.
        lasting: that a partition lasts until both have declared each other lost.
        meeting: that, instead of a step of the program, two that have lost each other meet again,
            or two that live lose each other.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    crash: float = 0.0
    restart: float = 0.0
    partition: float = 0.0
    lasting: float = 0.5
    meeting: float = 0.0

    @property
    def is_fifo(self) -> bool:
        """Return whether links lose nothing and keep the order."""
        return not (self.loss or self.reordering)

    @classmethod
    def drawn(cls, random: Random) -> Faults:
        """Return a random mix: some of the faults, at random rates. Every third network is FIFO."""
        draw = random.random
        fifo = draw() < 0.33
        return cls(
            loss=0.0 if fifo or draw() < 0.3 else 0.25 * draw(),
            duplication=0.0 if draw() < 0.4 else 0.3 * draw(),
            reordering=0.0 if fifo else 0.05 + 0.5 * draw(),
            crash=0.0 if draw() < 0.4 else 0.15 * draw(),
            restart=draw(),
            partition=0.0 if draw() < 0.5 else 0.06 * draw(),
            lasting=draw(),
            meeting=0.0 if draw() < 0.5 else 0.15 * draw(),
        )


class Network(Generic[M]):
    """Messages of any type on their way between workers. Not thread-safe."""

    def __init__(self, clock: ManualClock, random: Random, faults: Faults) -> None:
        self._clock = clock
        self._draw = random.random
        self._loss = faults.loss
        self._duplication = faults.duplication
        self._reordering = faults.reordering
        self._fifo = faults.is_fifo
        self._count = 0
        self._flying: list[tuple[float, int, int, int, M]] = []
        self._last: dict[tuple[int, int], float] = {}
        self._cut: dict[tuple[int, int], list[tuple[float, int, int, int, M]]] = {}

    def __repr__(self) -> str:
        return f"<Network with {len(self._flying)} messages under way>"

    def send(self, source: int, target: int, message: M) -> None:
        """Put a message on its way: it arrives once, or not, or twice."""
        if self._loss and self._draw() < self._loss:
            return
        self._launch(source, target, message)
        if self._duplication and self._draw() < self._duplication:
            self._launch(source, target, message)

    def deliver(self) -> tuple[int, int, M] | None:
        """Move the clock to the next arrival; return (source, target, message), or None if none."""
        while self._flying:
            flight = heapq.heappop(self._flying)
            moment, _, source, target, message = flight
            held = self._cut.get((source, target))
            if held is None:
                self._clock.advance_to(moment)
                return source, target, message
            if self._fifo:
                held.append(flight)
        return None

    def cut(self, one: int, other: int) -> None:
        """Let nothing pass between two workers, either way."""
        self._cut.setdefault((one, other), [])
        self._cut.setdefault((other, one), [])

    def heal(self, one: int, other: int) -> None:
        """Let messages pass again; a FIFO link goes on where it stopped."""
        for link in ((one, other), (other, one)):
            for flight in self._cut.pop(link, ()):
                heapq.heappush(self._flying, flight)

    def calm(self) -> None:
        """Stop losing and copying messages, and restore cut links, from now on."""
        self._loss = self._duplication = 0.0
        for one, other in list(self._cut):
            self.heal(one, other)

    def has_for(self, source: int, target: int) -> bool:
        """Return whether a message from one worker to another may still arrive."""
        flights = [*self._flying, *self._cut.get((source, target), ())]
        return any((flight[2], flight[3]) == (source, target) for flight in flights)

    def __len__(self) -> int:
        """Messages on their way, those on cut links excepted."""
        return len(self._flying)

    def _launch(self, source: int, target: int, message: M) -> None:
        delay = DELAY * (0.5 + self._draw())
        if self._reordering and self._draw() < self._reordering:
            delay *= 1.0 + SLOW * self._draw()
        arrival = self._clock.now + delay
        if self._fifo:
            arrival = self._last[source, target] = max(
                arrival, self._last.get((source, target), 0.0)
            )
        self._count += 1
        heapq.heappush(self._flying, (arrival, self._count, source, target, message))
