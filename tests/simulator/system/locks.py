"""`threading`, for the threads of a simulated system."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from simulator.system.scheduler import Process, Scheduler, SimThread


def _until(scheduler: Scheduler, timeout: float | None) -> float:
    return math.inf if timeout is None or timeout < 0 else scheduler.now + timeout


def me_of(scheduler: Scheduler) -> SimThread:
    """Return the calling thread, which is one of the system."""
    me = scheduler.current()
    assert me is not None, "a thread outside of the system waits"
    return me


class Threading:
    """The module `threading` of a simulated system."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX
    Thread = threading.Thread
    local = threading.local

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.get_ident = threading.get_ident

        class Lock(SimLock):
            def __init__(self) -> None:
                super().__init__(scheduler)

        class Event(SimEvent):
            def __init__(self) -> None:
                super().__init__(scheduler)

        class Condition(SimCondition):
            def __init__(self, lock: Any = None) -> None:
                super().__init__(scheduler, lock or SimRLock(scheduler))

        class RLock(SimRLock):
            def __init__(self) -> None:
                super().__init__(scheduler)

        class FarcallThread(SimFarcallThread):
            def __init__(self, target: Callable[[], None], name: str, what: str = "") -> None:
                process = me_of(scheduler).process
                super().__init__(scheduler, process, target, name, what)

        self.Lock, self.RLock, self.Event, self.Condition = Lock, RLock, Event, Condition
        self.FarcallThread = FarcallThread

    def current_thread(self) -> Any:
        me = self._scheduler.current()
        return threading.current_thread() if me is None else me.owner

    def main_thread(self) -> Any:
        me = self._scheduler.current()
        return threading.main_thread() if me is None else me.process.main

    def is_main_thread(self) -> bool:
        """Return what `farcall.threads.is_main_thread` would."""
        me = self._scheduler.current()
        return me is not None and me.process.main is me

    def enumerate(self) -> list[Any]:
        me = me_of(self._scheduler)
        return [one.owner for one in me.process.threads]


class SimFarcallThread:
    """As `farcall.threads.FarcallThread`."""

    daemon = True

    def __init__(
        self,
        scheduler: Scheduler,
        process: Process,
        target: Callable[[], None],
        name: str,
        what: str,
    ) -> None:
        self.name = name
        self.what = what
        self._scheduler = scheduler
        self._thread = SimThread(scheduler, process, target, name)
        self._thread.owner = self

    def __hash__(self) -> int:
        return self._thread.number

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def is_alive(self) -> bool:
        return self._thread.is_alive

    def start(self) -> None:
        self._scheduler.start(self._thread)
        self._scheduler.may_switch()

    def try_start(self) -> str | None:
        self.start()
        return None

    def join(self, timeout: float | None = None) -> None:
        until = _until(self._scheduler, timeout)
        while self._thread.is_alive and self._scheduler.now < until:
            self._thread.joiners.append(me_of(self._scheduler))
            self._scheduler.sleep(until)

    def join_if_started(self, timeout: float | None = None) -> None:
        if self.ident is not None and self is not me_of(self._scheduler).owner:
            self.join(timeout)


class SimLock:
    """As `threading.Lock`."""

    __slots__ = ("_locked", "_scheduler", "_waiting")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._locked = False
        self._waiting: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.may_switch()
        if not self._locked:
            self._locked = True
            return True
        if not blocking or timeout == 0:
            return False
        until = _until(scheduler, timeout)
        me = me_of(scheduler)
        while self._locked:
            if scheduler.now >= until:
                return False
            self._waiting.append(me)
            scheduler.sleep(until)
            if me in self._waiting:
                self._waiting.remove(me)
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        while self._waiting:
            thread = self._waiting.popleft()
            if thread.process.is_alive:
                self._scheduler.wake(thread)
                break

    def locked(self) -> bool:
        return self._locked

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class SimRLock:
    """As `threading.RLock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._lock = SimLock(scheduler)
        self._owner = 0
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self._owner == me:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if self._owner != threading.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = 0
            self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def leave(self) -> int:
        """Release it for a wait, however often it is held. Gives that number."""
        count, self._count = self._count, 1
        self.release()
        return count

    def come_back(self, count: int) -> None:
        """Undo `leave`."""
        self.acquire()
        self._count = count


class SimCondition:
    """As `threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: Any) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._waiting: list[SimThread] = []
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = me_of(self._scheduler)
        until = _until(self._scheduler, timeout)
        if self._scheduler.now >= until:
            return False
        self._waiting.append(me)
        is_reentrant = isinstance(self._lock, SimRLock)
        count = self._lock.leave() if is_reentrant else self._lock.release()
        try:
            while me in self._waiting and self._scheduler.now < until:
                self._scheduler.sleep(until)
            return me not in self._waiting
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            if is_reentrant:
                self._lock.come_back(count)
            else:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = _until(self._scheduler, timeout)
        result = predicate()
        while not result and self._scheduler.now < until:
            self.wait(None if until == math.inf else until - self._scheduler.now)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for thread in self._waiting[:n]:
            self._waiting.remove(thread)
            self._scheduler.wake(thread)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimEvent:
    """As `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._scheduler.wake(thread)
        if self._scheduler.current() is not None:
            self._scheduler.may_switch()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = _until(self._scheduler, timeout)
        me = me_of(self._scheduler)
        while not self._is_set and self._scheduler.now < until:
            self._waiting.append(me)
            self._scheduler.sleep(until)
            if me in self._waiting:
                self._waiting.remove(me)
        return self._is_set
