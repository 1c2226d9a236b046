"""Workers that leave together, and the links between them, on a virtual clock.

A worker's process may stand still (see `agenda`). It may stand still forever, as a stopped process
does or one whose host went dark, or die.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from farcall.protocol.termination import Silence, TerminationDetector


class Call(NamedTuple):
    """A call on its way to, or at, its callee.

    Attributes:
        number: the call's.
        chain: on behalf of whom; the last one waits for the answer.
    """

    number: int
    chain: tuple[int, ...]


class Answer(NamedTuple):
    """The end of a call."""

    number: int


class Loss:
    """The end of a link: the last that comes from a worker that died, left, or gave us up."""

    def __repr__(self) -> str:
        return "the end of the link"


@dataclass
class Member:
    """A worker as `ShutdownCoordinator` runs it: counts calls, and tells its `TerminationDetector`.

    Attributes:
        leaving: its user has called shutdown.
        given_up: another one has declared it lost, since it was silent.
        gone: whose end it has noticed.
        serving: what it serves.
        own: its calls: their servers, and the calls on whose behalf they are.
        stands_until: when its process goes on, in seconds; infinite: never.
        cut: to whom nothing went that it sent from when on: it died before it was written.
        heard: when each of those that it asks has answered last, or was asked first.
        asked: seconds of questions to each since then.
        asking: whom it asks just now.
    """

    number: int
    detector: TerminationDetector
    silence: Silence
    alive: bool = True
    leaving: bool = False
    given_up: bool = False
    gone: set[int] = field(default_factory=set)
    serving: list[Call] = field(default_factory=list)
    own: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    epoch: int = 0
    told: int = 0
    stands_until: float = 0.0
    cut: dict[int, float] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    asking: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"w{self.number}"

    @property
    def active(self) -> int:
        """Calls that go on here."""
        return len(self.own) + len(self.serving)

    @property
    def takes_part(self) -> bool:
        """Return whether it has neither died nor left."""
        return self.alive and not self.detector.dismissed

    @property
    def counts(self) -> bool:
        """Return whether the others have to wait for it."""
        return self.alive and not self.given_up

    def answers_at(self, now: float) -> float:
        """Return when the process answers a question that is asked now."""
        return max(now, self.stands_until) if self.takes_part else math.inf
