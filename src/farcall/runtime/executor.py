"""The threads of an agent: leader and followers.

One thread at a time is the *leader*: it takes events from the endpoint and handles them itself,
user functions included, so that a short call costs no hand-over between threads. The lead passes
to another thread when the leader

- enters a farcall wait (`waiting`): a nested call, `Future.wait`, `RRef.to_here`; or
- has been busy with one event for a millisecond, counted from `may_pass_lead`: a watchdog sees to
  that, as Go's sysmon does. `transport.base.Watch` looks for it, if it can without taking the
  interpreter from others.

Until the leader says `may_pass_lead`, no other thread takes an event. So the state machines see
the events of one link in their order, which the reference protocol relies on; what may take long
or run user code (sending, completing futures, functions) comes after.

At most `max_running` user functions run at once; more are queued, and replies are still received.
A function inside a farcall wait does not count, so nested and mutual calls of any depth never
exhaust the bound; when its wait ends it goes on at once, even if that makes one more for a while.
A wait that torch does by itself (`torch.futures.wait_all`, a plain `torch.futures.Future`) can't
announce itself; when functions are queued, the watchdog looks whether one that runs sits in such a
wait.

Locks: `_lock` guards every table here and is held for a few instructions; nothing that belongs to
the user runs under it. That a function has ended is noted without it: that only makes room.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from farcall.runtime.bell import Bell
from farcall.runtime.frames import current_frames
from farcall.runtime.isolation import isolate_callbacks, run_isolated
from farcall.transport.base import Endpoint, Event, Notice

logger = logging.getLogger("farcall")

TORCH_WAITS = (torch.futures.wait_all.__code__, torch.futures.Future.wait.__code__)
MAX_IN_A_ROW = 32
STAND_BACK = 0.005  # seconds
SPARE_THREADS = 2
SPARE_SECONDS = 10.0


class Handler(Protocol):
    """What the agent does with events and time."""

    def on_thread_start(self) -> None:
        """Called first in every thread."""

    def handle(self, event: Event) -> None:
        """An event arrived. May call `Executor.submit`."""

    def before_sleep(self) -> float:
        """Do what is due. When is something due next: `time.monotonic()` seconds, or inf."""


class _Wait:
    """See `Executor.waiting`."""

    __slots__ = ("_executor", "_me", "_ran")

    def __init__(self, executor: Executor, me: int) -> None:
        self._executor = executor
        self._me = me

    def __enter__(self) -> None:
        self._ran = self._executor.leave(self._me)

    def __exit__(self, *_: object) -> None:
        if self._ran:
            self._executor.come_back(self._me)


_NO_WAIT = nullcontext()


class Executor:
    """See the module's description. All methods may be called from any thread."""

    def __init__(self, name: str, endpoint: Endpoint, handler: Handler, max_running: int) -> None:
        self._name = name
        self._endpoint = endpoint
        self._handler = handler
        self._max_running = max_running
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._functions: deque[Callable[[], None]] = deque()
        self._running: set[int] = set()
        self._resting: list[threading.Lock] = []  # a bell for each thread that has nothing to do
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._leader = 0  # thread that has the lead; 0: nobody
        self._in_a_row = 0  # events that the leader took without a look at what is due
        self.is_completing = False  # a row of futures; see `let_complete`
        self._row_ends = Bell()
        self._stopping = False
        self._watch = endpoint.new_watch()  # over the leader and its event
        self._watchdog = threading.Thread(
            target=self._guard, name=f"farcall-watch-{name}", daemon=True
        )

    def start(self) -> None:
        self._watchdog.start()
        with self._lock:
            self._start_thread()

    def stop(self, timeout: float) -> bool:
        """Take no more events and end the threads. False: a user function still runs."""
        with self._lock:
            self._stopping = True
            self._functions.clear()
            while self._resting:
                self._resting.pop().release()
            threads = list(self._threads)
        self._endpoint.wake()
        self._watch.stop()
        deadline = time.monotonic() + timeout
        me = threading.current_thread()
        for thread in [*threads, self._watchdog]:
            if thread is not me:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in threads if t is not me)

    # Work that comes in.

    def post(self, event: Event) -> None:
        """An event that did not come through the endpoint (a call to oneself)."""
        with self._lock:
            self._events.append(event)
            self._find_thread()

    def submit(self, function: Callable[[], None]) -> None:
        """Run a user function, here and now if this is the leader and a place is free."""
        me = threading.get_ident()
        running = self._running
        with self._lock:
            here = self._leader == me and me not in running and len(running) < self._max_running
            if here:
                running.add(me)
            else:
                self._functions.append(function)
                # In this order: who ends a function looks whether one is queued.
                if len(running) < self._max_running:
                    self._find_thread()
                self._watch.set_queue(True)
        if here:
            if self.is_completing:
                self.end_row()
            self._watch.begin()
            self._run(me, function)

    def _run(self, me: int, function: Callable[[], None]) -> None:
        try:
            run_isolated(function)
        except BaseException:
            logger.exception("%s: an internal error while serving a call", self._name)
        finally:
            self._running.discard(me)
            # In this order: who queues a function then looks whether there is a place.
            if self._functions:
                with self._lock:
                    if self._functions and self._leader == me:
                        self._find_thread()

    def may_pass_lead(self) -> None:
        """The calling thread has done what must be done in order. No effect if it does not lead."""
        if self._leader == threading.get_ident():
            self._watch.begin()

    def completes(self) -> None:
        """Like `may_pass_lead`; the calling thread goes on to complete the future of a call."""
        if self._leader != threading.get_ident():
            return
        self._watch.begin()
        if self._in_a_row and not self.is_completing:
            self.begin_row()

    def let_complete(self) -> None:
        """If the leader completes a row of futures, wait for the end of that, but not for long.

        torch lets go of the interpreter whenever a future is completed. A thread that makes one
        call after the other, or waits for one future after the other, would take it each time.
        That costs more than all the rest of a call, so such threads stand back.

        A bell, and no `threading.Event`: Ctrl-C in the main thread may leave the lock of an event
        held, and the leader would wait for it forever.
        """
        if self._leader != threading.get_ident() and not self._row_ends.wait(STAND_BACK):
            self.end_row()

    def begin_row(self) -> None:
        """The leader completes futures, one after the other. See `let_complete`."""
        self._row_ends = Bell()
        self.is_completing = True

    def end_row(self) -> None:
        self.is_completing = False
        self._row_ends.ring()

    # Waiting inside user functions.

    @property
    def running(self) -> int:
        """How many functions run, but for those that wait for farcall."""
        return len(self._running)

    def is_at_work(self) -> bool:
        """Whether the calling thread leads or runs a function: `waiting` has something to do."""
        me = threading.get_ident()
        # Of both the thread itself is the only one that makes them so.
        return me == self._leader or me in self._running

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait for farcall: another thread leads and runs functions instead."""
        return _Wait(self, threading.get_ident()) if self.is_at_work() else _NO_WAIT

    def leave(self, me: int) -> bool:
        """The calling thread begins to wait. Gives whether it runs a function."""
        with self._lock:
            ran = me in self._running
            if ran:
                self._running.discard(me)
            if self._leader == me:
                self._pass_lead()
            elif ran and self._functions:
                self._find_thread()
        return ran

    def come_back(self, me: int) -> None:
        """The wait of a thread that runs a function is over."""
        with self._lock:
            self._running.add(me)

    def _pass_lead(self) -> None:
        if self.is_completing:
            self.end_row()
        self._leader = 0
        self._watch.end()
        self._find_thread()

    def _find_thread(self) -> None:
        """Somebody has to look for work: wake a follower or start one. Lock held."""
        if self._resting:
            self._resting.pop().release()
        elif not self._stopping:
            self._start_thread()

    def _start_thread(self) -> None:
        self._started += 1
        thread = threading.Thread(
            target=self._follow, name=f"farcall-{self._name}-{self._started}", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    # The threads.

    def _follow(self) -> None:
        me = threading.get_ident()
        self._handler.on_thread_start()
        isolate_callbacks()
        try:
            while self._do_something(me):
                pass
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _do_something(self, me: int) -> bool:
        """Run a queued function, lead, or rest. False: this thread is not needed any more."""
        function: Callable[[], None] | None = None
        event: Event | None = None
        bell: threading.Lock | None = None
        with self._lock:
            if self._stopping:
                return False
            if self._functions and len(self._running) < self._max_running:
                function = self._functions.popleft()
                self._running.add(me)
                if not self._functions:
                    self._watch.set_queue(False)
            elif self._events:
                event = self._events.popleft()
            elif self._leader:
                if len(self._resting) >= SPARE_THREADS:
                    return False
                bell = threading.Lock()
                bell.acquire()
                self._resting.append(bell)
            else:
                self._leader = me
            if (function or event) and not self._leader:
                self._find_thread()
        if function is not None:
            self._run(me, function)
        elif event is not None:
            self._handle(event)
        elif bell is not None:
            return self._rest(bell)
        else:
            self._lead(me)
        return True

    def _rest(self, bell: threading.Lock) -> bool:
        """Sleep until there is work. False: for so long that one thread less will do."""
        if bell.acquire(timeout=SPARE_SECONDS):
            return True
        with self._lock:
            if bell not in self._resting:
                return True  # it rang after all, just now
            self._resting.remove(bell)
            return False

    def _lead(self, me: int) -> None:
        """Take and handle events until the lead is lost or the agent stops."""
        event: Event | None = None
        self._in_a_row = 0
        due = 0.0
        while not self._stopping:
            if event is not None:
                self._handle(event)
                self._in_a_row += 1
            elif self.is_completing:
                self.end_row()
            if event is None or self._in_a_row == MAX_IN_A_ROW:
                due = self._before_sleep()
                self._in_a_row = 0
            with self._lock:
                if self._leader != me:
                    return
                self._watch.end()
                event = self._events.popleft() if self._events else None
            if event is None and self._in_a_row:
                event = self._poll()
            elif event is None:
                event = self._next(0.0 if self.is_completing else due)
        with self._lock:
            if self._leader == me:
                self._leader = 0

    def _handle(self, event: Event) -> None:
        try:
            self._handler.handle(event)
        except BaseException:
            logger.exception("%s: an internal error while handling %r", self._name, event)

    def _before_sleep(self) -> float:
        try:
            return self._handler.before_sleep()
        except BaseException:
            logger.exception("%s: an internal error in a timer", self._name)
            return time.monotonic() + 1.0

    def _poll(self) -> Event | None:
        try:
            return self._endpoint.poll()
        except BaseException:
            logger.exception("%s: an internal error while receiving", self._name)
            return None

    def _next(self, due: float) -> Event | None:
        timeout = None if due == math.inf else max(0.0, due - time.monotonic())
        try:
            return self._endpoint.next(timeout)
        except BaseException:
            logger.exception("%s: an internal error while receiving", self._name)
            return None

    def _guard(self) -> None:
        """The watchdog: pass the lead on when the leader is busy for too long."""
        while notice := self._watch.wait():
            if notice == Notice.STARVING:
                self._discount_torch_waits()
                continue
            with self._lock:
                if self._leader and self._watch.is_overdue():
                    self._pass_lead()

    def _discount_torch_waits(self) -> None:
        waiting = {
            thread for thread, frame in current_frames().items() if frame.f_code in TORCH_WAITS
        }
        with self._lock:
            if len(self._running) < self._max_running:
                return
            for thread in waiting & self._running:
                self._running.discard(thread)
                self._find_thread()
