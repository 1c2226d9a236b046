"""Faults in a schedule of whole workers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class AgentFaults:
    """The rates of faults, per 100 seconds and worker; 0: never.

    Attributes:
        stand: a worker stands still, up to 50 s.
        kill: a worker is killed. In an open group it comes again.
        cut: nothing gets through between two hosts, up to 100 s.
        dark: a host is cut off from all, up to 100 s.
        slow_store: the store answers after seconds.
        dark_store: the store keeps silent.
        dead_store: the store is gone, and comes again, empty.
        preempt: another thread runs in the middle of something, as a probability.
        interrupt: Ctrl-C in a main thread.
    """

    stand: float
    kill: float
    cut: float
    dark: float
    slow_store: float
    dark_store: float
    dead_store: float
    preempt: float
    interrupt: float

    @classmethod
    def draw(cls, random: Random) -> AgentFaults:
        """Return some of them, or none."""

        def rate(most: float) -> float:
            return random.choice((0.0, most * random.random()))

        return cls(
            stand=rate(8.0),
            kill=rate(4.0),
            cut=rate(4.0),
            dark=rate(2.0),
            slow_store=rate(2.0),
            dark_store=rate(2.0),
            dead_store=rate(2.0),
            preempt=random.choice((0.0, 0.01, 0.1)),
            interrupt=rate(10.0),
        )


def moments(random: Random, rate: float, seconds: float) -> list[float]:
    """Draw when a fault happens, that does so `rate` times in 100 seconds."""
    found: list[float] = []
    moment = 0.0
    while rate:
        moment += random.expovariate(rate / 100)
        if moment >= seconds:
            break
        found.append(moment)
    return found
