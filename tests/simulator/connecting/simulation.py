"""One schedule of connecting: many callers, one worker, everything at moments drawn from a seed.

The machine is `farcall.protocol.connecting.Connecting`, as `transport/connect/dialling.py` runs
it. Around it are callers with deadlines from a tenth of a second to none, a host with faults
(`world`), and standstills of the dialling process at any event: the event is handled that much
later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
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
    WaitForDialler,
)
from simulator.agenda import Agenda
from simulator.connecting.oracle import Caller, ConnectingOracle
from simulator.connecting.planted import ConnectingBug, machine_of
from simulator.connecting.world import Outcome, World
from simulator.schedule import Result, Schedule, Script

END = 1200.0  # seconds; the host has been as it is for long by then
CALM = 300.0  # seconds before that in which the dialler does not begin to stand still
MAX_EVENTS = 4000
BEGINNINGS = 150.0  # seconds in which callers begin


class Habit(NamedTuple):
    """A caller's habit: how often it calls, with which timeouts, with which seconds in between."""

    calls: int
    timeouts: Sequence[float]
    gaps: Sequence[float]


ANY = (0.1, 0.5, 2.0, 10.0, 60.0, 60.0, math.inf)
GAPS = (0.0, 0.01, 5.0, 100.0)
HABITS = (
    *(Habit(calls, ANY, GAPS) for calls in (1, 1, 1, 1, 1, 1, 3, 3, 3, 20, 20)),
    Habit(400, (0.1, 0.25), (0.01,)),  # in haste, again and again
)


def simulate_connecting(
    seed: int, *, bug: ConnectingBug | None = None, script: Script | None = None
) -> Result:
    """Run one schedule.

    Args:
        seed: equal arguments give equal results.
        bug: a mistake to plant in the machine, to see it found.
        script: see `Schedule`. The inputs are calls, interruptions, standstills of the dialler,
            and what becomes of the host.
    """
    return _ConnectingSchedule(seed, bug, script).run()


class _Dialler:
    """The process that dials. While it stands still, the clock goes on in one step."""

    number = 0
    stands_until = 0.0


class _ConnectingSchedule(Schedule):
    def __init__(self, seed: int, bug: ConnectingBug | None, script: Script | None) -> None:
        super().__init__(seed, script)
        random = self._random
        self._world = World(random, self._happens)
        self._oracle = ConnectingOracle(self._world)
        self._violations = self._oracle.violations
        self._machine: Connecting = machine_of(bug)(self._world.addresses, self._world.dead_after)
        self._standstills = random.choice((0.0, 0.0, 0.02, 0.15))  # chance at each event
        self._interruptions = random.choice((0.0, 0.0, 0.02))
        self._callers: list[Caller] = []
        self._agenda: Agenda[_Dialler] = Agenda(self._clock, random)
        self._dialler = _Dialler()
        for number in range(random.choice((1, 1, 2, 4, 12))):
            begins = random.choice((0.0, random.uniform(0.0, BEGINNINGS)))
            self._call(begins, number, random.choice(HABITS))

    def _call(self, moment: float, number: int, habit: Habit) -> None:
        if self._happens():
            self._at(moment, lambda: self._begin(number, habit))

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        if moment < END:
            self._agenda.at(moment, self._dialler, act)

    def _play(self) -> None:
        self._note("addresses", *(address.url for address in self._world.addresses))
        self._note("dead after", self._world.dead_after, "refuses us:", self._world.refuses)
        for url, stranger in self._world.strangers.items():
            self._note(url, "leads to another host, which", stranger.value)
        for _, act in islice(self._agenda, MAX_EVENTS):
            self._perhaps_stand_still()
            act()
            self._oracle.check(self._callers, self._clock.now)
            if self._violations:
                return
        if not self._agenda:
            self._oracle.check_end(self._callers, self._clock.advance_to(END))

    def _perhaps_stand_still(self) -> None:
        if self._random.random() < self._standstills and self._clock.now < END - CALM:
            seconds = self._random.choice((0.1, 1.0, 10.0, 60.0)) * self._random.random()
            if self._happens():
                self._clock.advance(seconds)
                self._oracle.stood_still(self._clock.now)
                self._note("the dialler has stood still for", f"{seconds:.2f} s")

    # Events.

    def _begin(self, number: int, habit: Habit) -> None:
        random, now = self._random, self._clock.now
        length = random.choice(habit.timeouts)
        caller = Caller(number, now, now + length)
        self._callers.append(caller)
        self._note(caller, "wants a link within", length, "s; the host is", self._mode())
        self._tell(caller, self._machine.begin(caller, now, caller.deadline))
        if not caller.ended and random.random() < self._interruptions:
            moment = now + random.uniform(0.0, min(length, 20.0))
            if self._happens():
                self._at(moment, lambda: self._interrupt(caller))
        if habit.calls > 1 and length < math.inf:
            next_at = now + length + random.choice(habit.gaps)
            self._call(next_at, number, habit._replace(calls=habit.calls - 1))

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
        if not (isinstance(said, WaitForDialler) and said == caller.instruction):
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
            case WaitForDialler(until):
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
            if not other.ended and isinstance(other.instruction, WaitForDialler):
                self._later(other, self._clock.now, partial(self._wake, other))

    def _mode(self) -> str:
        return self._world.mode(self._clock.now).value
