"""Processes and threads of a simulated system, of which one runs until it lets another one."""

from __future__ import annotations

import _thread
import heapq
import itertools
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Act = Callable[[], None]
PATIENT_LOOKS = 100  # at the clock, after which a thread lets others run

_this_thread = threading.local()


class Stuck(Exception):
    """Nothing can happen any more, and the program has not ended."""


class Process:
    """A process of a simulated host.

    Args:
        name: for people.
        host: where it runs; belongs to `network`.

    Attributes:
        is_alive: False once it was killed or has ended. Its threads never run again.
        stands_until: when its threads go on, in virtual seconds; the past: they do.
        stood: the intervals in which it stood still.
        main: its first thread.
        threads: those that have not ended.
        on_kill: called when it is killed.
        world: whatever the simulation keeps with it.
        takes_interrupts: its first thread is where Ctrl-C may come.
        is_interrupted: its first thread is to raise KeyboardInterrupt.
    """

    def __init__(self, name: str, host: Any = None) -> None:
        self.name = name
        self.host = host
        self.is_alive = True
        self.stands_until = -math.inf
        self.stood: list[tuple[float, float]] = []
        self.main: SimThread | None = None
        self.threads: set[SimThread] = set()
        self.on_kill: list[Act] = []
        self.world: Any = None
        self.takes_interrupts = False
        self.is_interrupted = False

    def __repr__(self) -> str:
        return self.name

    def stood_between(self, begin: float, end: float) -> float:
        """Return for how many seconds of an interval the process stood still."""
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.stood)


class SimThread:
    """A thread of a simulated process: one of the real system, which runs only in its turn."""

    def __init__(self, scheduler: Scheduler, process: Process, target: Act, name: str) -> None:
        self.scheduler = scheduler
        self.process = process
        self.name = name
        self.ident: int | None = None
        self.is_alive = False
        self.joiners: list[SimThread] = []
        self.owner: Any = self  # what `threading.current_thread` gives
        self.woken = False
        self._target = target
        self._turn = _thread.allocate_lock()
        self._turn.acquire()
        self._sleep = 0  # the number of its present sleep; odd while it sleeps
        self.number = next(scheduler.thread_numbers)

    def __hash__(self) -> int:
        return self.number  # the order of a set of threads is the same each time

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"{self.process.name}:{self.name}"


class Scheduler:
    """Decides which thread runs, and what happens when.

    Args:
        random: draws.
        preempts: how likely it is that another thread runs at a point where one could.

    Attributes:
        now: virtual seconds.
        failures: what the threads of processes raised, as text.
    """

    def __init__(self, random: Random, preempts: float) -> None:
        self.now = 0.0
        self.failures: list[str] = []
        self.random = random
        self._preempts = preempts
        self._agenda: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()
        self.thread_numbers = itertools.count()
        self._ready: list[SimThread] = []
        self._end = _thread.allocate_lock()
        self._end.acquire()
        self._has_ended = False
        self._stuck = ""
        self._idle_steps = 0
        self.all_threads: set[SimThread] = set()
        self.switches = 0
        self.events = 0

    # From outside.

    def run(self, seconds: float = 60.0) -> None:
        """Run until `finish` is called.

        Args:
            seconds: of real time after which the schedule counts as stuck.

        Raises:
            Stuck: nothing can happen any more, or real time is over.
        """
        first = self._pick()
        if first is not None:
            first._turn.release()
        if not self._end.acquire(timeout=seconds):
            self._has_ended = True
            raise Stuck(f"{seconds:.0f} s of real time are over\n{self.describe()}")
        if self._stuck:
            raise Stuck(self._stuck)

    # From threads of the system, and from what happens in it.

    @staticmethod
    def current() -> SimThread | None:
        """Return the calling thread, if it is one of a simulated system."""
        return getattr(_this_thread, "value", None)

    def at(self, moment: float, act: Act) -> None:
        """Have something happen. It must not wait, nor run code of a process."""
        heapq.heappush(self._agenda, (moment, next(self._numbers), act))

    def after(self, seconds: float, act: Act) -> None:
        """Act as `at` does, but so many seconds from now."""
        self.at(self.now + seconds, act)

    def start(self, thread: SimThread) -> None:
        """Start a thread."""
        thread.is_alive = True
        thread.process.threads.add(thread)
        self.all_threads.add(thread)
        thread.ident = _thread.start_new_thread(self._begin, (thread,))
        self._ready.append(thread)

    def sleep(self, until: float = math.inf) -> bool:
        """Have the calling thread sleep until another one wakes it, or until that moment.

        Returns:
            Whether it was woken.
        """
        me = _this_thread.value
        me.woken = False
        me._sleep += 1
        if until < math.inf:
            number = me._sleep
            self.at(until, lambda: self._wake(me, number, woken=False))
        self._hand_over(me)
        self._check_signals(me)
        return me.woken  # type: ignore[no-any-return]

    def wake(self, thread: SimThread) -> None:
        """End a thread's sleep. No effect if it does not sleep."""
        self._wake(thread, thread._sleep, woken=True)

    def may_switch(self) -> None:
        """Let another thread run, perhaps."""
        if self._preempts and self.random.random() < self._preempts:
            me = getattr(_this_thread, "value", None)
            if me is not None:
                self._ready.append(me)
                self._hand_over(me)
        self._check_signals(getattr(_this_thread, "value", None))

    def _check_signals(self, me: SimThread | None) -> None:
        if me is not None and me.process.is_interrupted and me.process.main is me:
            me.process.is_interrupted = False
            raise KeyboardInterrupt

    def look_at_clock(self) -> float:
        """Return the virtual time. A thread that only looks at it counts as stuck in the end."""
        self._idle_steps += 1
        if self._idle_steps % PATIENT_LOOKS == 0 and next(self._may_run(), None) is not None:
            self._ready.append(me := _this_thread.value)  # what it waits for may be one of these
            self._hand_over(me)
        if self._idle_steps > 200_000:
            self._stop(f"a thread looks at the clock without end\n{self.describe()}")
            self._park()
        return self.now

    def stand(self, process: Process, seconds: float) -> None:
        """Have all threads of a process stand still, as if it were stopped."""
        end = self.now + seconds
        if process.stands_until >= end or not process.is_alive:
            return
        process.stood.append((max(self.now, process.stands_until), end))
        process.stands_until = end
        self.at(end, lambda: None)

    def kill(self, process: Process) -> None:
        """End a process at once, as by SIGKILL."""
        if process.is_alive:
            process.is_alive = False
            self._ready = [one for one in self._ready if one.process is not process]
            for act in process.on_kill:
                act()

    def interrupt(self, process: Process) -> None:
        """Have Ctrl-C reach the first thread of a process, soon, or as soon as it waits."""
        if process.takes_interrupts and process.main is not None:
            process.is_interrupted = True
            self.wake(process.main)

    def finish(self) -> None:
        """End `run`."""
        self._stop("")

    def describe(self) -> str:
        """Return what all threads do, for people."""
        frames = sys._current_frames()
        lines = [f"at {self.now:.3f} s:"]
        for thread in sorted(self.all_threads, key=repr):
            if not thread.process.is_alive:
                continue
            state = "ready" if thread in self._ready else "sleeps" if thread._sleep % 2 else "runs"
            lines.append(f"{thread!r} {state}")
            frame = frames.get(thread.ident or 0)
            lines += traceback.format_stack(frame)[-12:] if frame is not None else []
        return "\n".join(lines)

    # Inside.

    def _stop(self, why: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._stuck = why
            self._end.release()

    def _wake(self, thread: SimThread, number: int, *, woken: bool) -> None:
        if thread._sleep == number and number % 2:
            thread._sleep += 1
            thread.woken = woken
            if thread.process.is_alive:
                self._ready.append(thread)

    def _begin(self, thread: SimThread) -> None:
        _this_thread.value = thread
        thread._turn.acquire()
        try:
            thread._target()
        except BaseException:
            self.failures.append(f"{thread!r} ended with\n{traceback.format_exc()}")
        thread.is_alive = False
        thread.process.threads.discard(thread)
        self.all_threads.discard(thread)
        for joiner in thread.joiners:
            self.wake(joiner)
        following = self._pick()
        if following is not None:
            following._turn.release()

    def _hand_over(self, me: SimThread) -> None:
        following = self._pick()
        if following is me:
            return
        self.switches += 1
        if following is not None:
            following._turn.release()
        me._turn.acquire()

    def _park(self) -> None:
        _this_thread.value._turn.acquire()

    def _may_run(self) -> Iterator[int]:
        now = self.now
        for index, thread in enumerate(self._ready):
            if thread.process.stands_until <= now:
                yield index

    def _pick(self) -> SimThread | None:
        """Return the thread that runs next. Until there is one, run the events that are due."""
        while not self._has_ended:
            ready = list(self._may_run())
            if ready:
                index = ready[0] if len(ready) == 1 else self.random.choice(ready)
                return self._ready.pop(index)
            if not self._agenda:
                self._stop(f"nothing can happen any more\n{self.describe()}")
                break
            moment, _, act = heapq.heappop(self._agenda)
            if moment > self.now:
                self.now = moment
                self._idle_steps = 0
            self.events += 1
            act()
        return None
