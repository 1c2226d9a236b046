"""One schedule of connecting: many callers, one worker, everything at moments drawn from a seed.

The machine is `farcall.protocol.connecting.Connecting`, as `transport/connect/dialling.py` runs it. Around
it are callers with deadlines from a tenth of a second to none, a host with faults (`world`), and
standstills of the dialling process at any event: the event is handled that much later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from farcall.protocol.connecting import (
    Connecting,
    Dead,
    Instruction,
    Late,
    Linked,
    Pause,
    Talk,
    Try,
    Wait,
)
from farcall.testing.clock import ManualClock
from farcall.testing.connecting.oracle import Caller, ConnectingOracle
from farcall.testing.connecting.planted import ConnectingBug, machine_of
from farcall.testing.connecting.world import Outcome, World
from farcall.testing.network import Faults
from farcall.testing.oracle import Violation
from farcall.testing.simulation import Event, Result

NO_FAULTS = Faults()  # those of messages: here is none
END = 1200.0  # seconds; the host has been as it is for long by then
MAX_EVENTS = 4000
BEGINNINGS = 150.0  # seconds in which callers begin


class Habit(NamedTuple):
    """How a caller calls: how often, with which timeouts, with which seconds in between."""

    calls: int
    timeouts: Sequence[float]
    gaps: Sequence[float]


ANY = (0.1, 0.5, 2.0, 10.0, 60.0, 60.0, math.inf)
GAPS = (0.0, 0.01, 5.0, 100.0)
HABITS = (
    *(Habit(calls, ANY, GAPS) for calls in (1, 1, 1, 1, 1, 1, 3, 3, 3, 20, 20)),
    Habit(400, (0.1, 0.25), (0.01,)),  # in haste, again and again
)


def simulate_connecting(seed: int, *, bug: ConnectingBug | None = None) -> Result:
    """Run one schedule.

    Args:
        seed: equal arguments give equal results.
        bug: a mistake to plant in the machine, to see it found.
    """
    return _Schedule(seed, bug).run()


class _Schedule:
    def __init__(self, seed: int, bug: ConnectingBug | None) -> None:
        self._seed = seed
        self._random = random = Random(seed)
        self._clock = ManualClock()
        self._world = World(random)
        self._oracle = ConnectingOracle(self._world)
        self._machine: Connecting = machine_of(bug)(self._world.addresses, self._world.dead_after)
        self._standstills = random.choice((0.0, 0.0, 0.02, 0.15))  # chance at each event
        self._interruptions = random.choice((0.0, 0.0, 0.02))
        self._callers: list[Caller] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._log: list[Event] = []
        for number in range(random.choice((1, 1, 2, 4, 12))):
            self._draw_caller(number)

    def _draw_caller(self, number: int) -> None:
        random = self._random
        begins = random.choice((0.0, random.uniform(0.0, BEGINNINGS)))
        habit = random.choice(HABITS)
        self._at(begins, lambda: self._begin(number, habit))

    def run(self) -> Result:
        self._note("addresses", *(address.url for address in self._world.addresses))
        self._note("dead after", self._world.dead_after, "refuses us:", self._world.refuses)
        for url, stranger in self._world.strangers.items():
            self._note(url, "leads to another host, which", stranger.value)
        try:
            while self._queue and not self._oracle.violations and self._count < MAX_EVENTS:
                self._step()
                if self._clock.now > END:
                    break
            if not self._oracle.violations and self._count < MAX_EVENTS:
                self._oracle.check_end(self._callers, self._clock.now)
        except (AttributeError, AssertionError, IndexError, ValueError) as error:
            violation = Violation("ERROR", f"the machine raised {type(error).__name__}: {error}")
            self._oracle.violations.append(violation)
        violations = tuple(self._oracle.violations)
        return Result(self._seed, NO_FAULTS, len(self._log), violations, tuple(self._log))

    # Events.

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (moment, self._count, act))

    def _step(self) -> None:
        moment, _, act = heapq.heappop(self._queue)
        if moment == math.inf:
            self._clock.advance_to(END + 1)
            return
        self._clock.advance_to(moment)
        if self._random.random() < self._standstills:
            seconds = self._random.choice((0.1, 1.0, 10.0, 60.0)) * self._random.random()
            self._clock.advance(seconds)
            self._oracle.stood_still(self._clock.now)
            self._note("the dialler has stood still for", f"{seconds:.2f} s")
        act()
        self._oracle.check(self._callers, self._clock.now)

    def _begin(self, number: int, habit: Habit) -> None:
        random, now = self._random, self._clock.now
        length = random.choice(habit.timeouts)
        caller = Caller(number, now, now + length)
        self._callers.append(caller)
        self._note(caller, "wants a link within", length, "s; the host is", self._mode())
        self._tell(caller, self._machine.begin(caller, now, caller.deadline))
        if not caller.ended and random.random() < self._interruptions:
            self._at(now + random.uniform(0.0, min(length, 20.0)), lambda: self._interrupt(caller))
        if habit.calls > 1 and length < math.inf:
            next_at = now + length + random.choice(habit.gaps)
            later = habit._replace(calls=habit.calls - 1)
            self._at(next_at, lambda: self._begin(number, later))

    def _interrupt(self, caller: Caller) -> None:
        if not caller.ended:
            self._note(caller, "is interrupted")
            self._oracle.interrupted(self._clock.now)
            self._end(caller)

    def _wake(self, caller: Caller) -> None:
        now = self._clock.now
        self._tell(caller, self._machine.woke(caller, now, caller.deadline))

    def _end_attempt(self, caller: Caller, said: Try, began: float, was: Outcome) -> None:
        now = self._clock.now
        if was.failure is None:
            self._note(caller, "has a connection to", said.url)
            self._tell(caller, self._machine.connected(now), said.url)
            return
        self._oracle.attempted(said.url, began, said.until - began, now, was)
        self._fail(caller, said.url, was)

    def _end_talk(self, caller: Caller, url: str, was: Outcome) -> None:
        self._oracle.talked(url, was)
        if was.failure is not None:
            self._fail(caller, url, was)
            return
        self._note(caller, "has a link")
        self._machine.linked()
        self._end(caller)

    def _end_pause(self, caller: Caller, said: Pause, began: float) -> None:
        self._oracle.paused(began, said.until - began, self._clock.now)
        self._wake(caller)

    def _fail(self, caller: Caller, url: str, was: Outcome) -> None:
        assert was.failure is not None
        self._note(caller, url, "failed:", was.failure.name, "the host is", self._mode())
        said = self._machine.failed(self._clock.now, was.failure, self._random.random())
        self._oracle.answered(url, was.failure, said)
        self._tell(caller, said, url)

    # Instructions.

    def _tell(self, caller: Caller, said: Instruction, url: str = "") -> None:
        now = self._clock.now
        others = [other for other in self._callers if other is not caller]
        self._oracle.told(caller, said, now, others)
        if not (isinstance(said, Wait) and said == caller.instruction):
            self._note(caller, "is told", said)
        caller.instruction = said
        caller.turn += 1
        match said:
            case Try():
                self._oracle.begins(said.url)
                was = self._world.connect(said.url, now, said.until)
                self._later(caller, was.at, lambda: self._end_attempt(caller, said, now, was))
            case Talk(until):
                talked = self._world.talk(url, now, until)
                self._later(caller, talked.at, lambda: self._end_talk(caller, url, talked))
            case Pause(until):
                self._later(caller, until, lambda: self._end_pause(caller, said, now))
            case Wait(until):
                self._later(caller, until, lambda: self._wake(caller))
            case Linked() | Late() | Dead():
                self._end(caller)

    def _later(self, caller: Caller, moment: float, act: Callable[[], None]) -> None:
        turn = caller.turn

        def unless_void() -> None:
            if caller.turn == turn and not caller.ended:
                act()

        self._at(moment, unless_void)

    def _end(self, caller: Caller) -> None:
        caller.ended = True
        self._callers.remove(caller)
        self._machine.left(caller)
        for other in self._callers:
            if not other.ended and isinstance(other.instruction, Wait):
                self._later(other, self._clock.now, partial(self._wake, other))

    def _mode(self) -> str:
        return self._world.mode(self._clock.now).value

    def _note(self, *what: object) -> None:
        self._log.append(Event(self._clock.now, what))
