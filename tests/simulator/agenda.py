"""The future events at simulated processes, on a virtual clock, and links between them.

Every link keeps its order; of two links either may be faster. A process may stand still: what
happens at it happens when it goes on, if it does.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Generic, Protocol, TypeVar

from farcall.testing.clock import ManualClock


class Process(Protocol):
    """A process.

    Attributes:
        number: its own.
        stands_until: when it goes on, in seconds; infinite: never.
    """

    number: int
    stands_until: float


M = TypeVar("M", bound=Process)


class Agenda(Generic[M]):
    """The queue of future events, and the links.

    Args:
        clock: goes on to what happens next.
        random: draws delays.
        slowest: seconds that a message may take.
    """

    def __init__(self, clock: ManualClock, random: Random, slowest: float = 0.0) -> None:
        self.clock = clock
        self._random = random
        self._slowest = slowest
        self._queue: list[tuple[float, int, M, Callable[[], None]]] = []
        self._count = 0
        self._arrivals: dict[tuple[int, int], float] = {}

    def at(self, moment: float, member: M, act: Callable[[], None]) -> None:
        """Have something happen at a worker, then or when it goes on."""
        self._count += 1
        heapq.heappush(self._queue, (moment, self._count, member, act))

    def send(self, sender: int, to: M, act: Callable[[], None]) -> None:
        """Have a message arrive after all that went before it by that link."""
        ends = sender, to.number
        delay = (0.0, 0.0, 0.001, self._slowest)[int(4 * self._random.random())]
        delay *= self._random.random()
        arrival = max(self.clock.now + delay, self._arrivals.get(ends, 0.0))
        self._arrivals[ends] = arrival
        self.at(arrival, to, act)

    def __len__(self) -> int:
        """Return how much is to happen yet."""
        return len(self._queue)

    def __iter__(self) -> Iterator[tuple[M, Callable[[], None]]]:
        """Give the events, in order, at workers that don't stand still; the clock goes along."""
        queue, clock = self._queue, self.clock
        while queue:
            moment, number, member, act = heapq.heappop(queue)
            if member.stands_until > moment:
                if member.stands_until < math.inf:
                    heapq.heappush(queue, (member.stands_until, number, member, act))
                continue
            clock.advance_to(moment)
            yield member, act
