"""The threads of an agent: leader and followers.

One thread at a time is the *leader*: it takes events from the endpoint and handles them itself,
user functions included, so that a short call costs no hand-over between threads. The lead passes
to another thread when the leader

- enters a farcall wait (`waiting`): a nested call, `Future.wait`, `RRef.to_here`; or
- has been busy with one event for one to four milliseconds, counted from `allow_promotion`: a
  watchdog sees to that, as Go's sysmon does. `transport.base.Watch` looks for it, if it can without
  taking the GIL from others.

Until the leader says `allow_promotion`, no other thread takes an event. So the state machines see
the events of one link in their order, which the reference protocol relies on; work that may take
long or run user code (sending, completing futures, functions) comes after. The word of a thread
that has just lost the lead does not count (docs/threads.md).

At most `max_running` user functions run at once, and some more of callers that would have none
(`function_queue`); others are queued, and replies are still received.
A function inside a farcall wait does not count, so nested and mutual calls of any depth never
exhaust the bound; when its wait ends it goes on at once, even if that makes one more for a while.

But each function that waits keeps a thread, and there are at most `max_threads`, or fewer if the
system gives no more; functions stay queued until there is one. A thread can always lead: the leader
runs a function, or a callback that may wait, only if another thread rests, and else queues it.

Locks: `_lock` guards every table here and is held for a few instructions; nothing that belongs to
the user runs under it. That a function has ended is noted without it: that only makes room.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext

from farcall.errors import FarcallError
from farcall.log import get_logger
from farcall.runtime.threads.collecting import Collecting
from farcall.runtime.threads.completion_batch import CompletionBatch
from farcall.runtime.threads.event_source import EventSource, Handler
from farcall.runtime.threads.followers import Followers
from farcall.runtime.threads.function_queue import (
    DEEPEST,
    DEFAULT_MAX_THREADS,
    Function,
    FunctionQueue,
)
from farcall.runtime.threads.isolation import Isolation, isolate_thread
from farcall.runtime.threads.places import OWN, Places
from farcall.runtime.threads.thread_state import float_control
from farcall.runtime.threads.turns import Turns
from farcall.runtime.threads.waits import Wait, threads_in_torch_waits
from farcall.threads import FarcallThread
from farcall.transport.base import Endpoint, Event, Notice

logger = get_logger("farcall")

MAX_IN_A_ROW = 32
PAUSE_SECONDS = 0.01  # of the watchdog, when no thread can take the lead over

_NO_WAIT = nullcontext()


class Executor:
    """See the module's description. All methods may be called from any thread.

    Args:
        name: of the worker.
        endpoint: where events come from.
        handler: what to do with them.
        max_running: how many functions may run at once, those that wait not counted; an attribute.
        max_threads: how many threads there may be, the watchdog not counted.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        handler: Handler,
        max_running: int,
        max_threads: int = DEFAULT_MAX_THREADS,
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self.handler = handler
        self.collecting = Collecting()
        self._floats = float_control()
        self._source = EventSource(name, endpoint, handler)
        self.max_running = max_running
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._queue = FunctionQueue(max_threads, max_running)
        self._places = Places(max_running, self._queue.guests)
        self._running, self._away = self._places.running, self._places.away
        self._followers = Followers(name, self._follow, self._lock, max_threads)
        self._resting, self._threads = self._followers.resting, self._followers.threads
        self._turns = Turns(self._queue, self._places, self._followers, max_threads)
        # Of the threads that have had work. Settings made meanwhile for new threads are for others.
        self._isolations: dict[int, Isolation] = {}
        self._leader = 0  # thread that has the lead; 0: none
        self._place_of_callbacks = OWN  # that the leader runs, or ran last
        self._runs_callbacks = False  # the leader does: they may wait, and then another has to lead
        self._in_a_row = 0  # events that the leader took without a look at due work
        self.batch = CompletionBatch()
        self._stopping = False
        self._watch = endpoint.new_watch()  # over the leader and its event
        self._watchdog = FarcallThread(self._guard, f"farcall-watch-{name}")

    def start(self) -> None:
        """Start the threads.

        Raises:
            FarcallError: the system gives no threads.
        """
        refused = self._watchdog.try_start()
        with self._lock:
            started = refused is None and self._followers.start_first()
        if not started:
            self.stop(1.0)
            raise FarcallError(
                f"the threads of worker {self._name!r} can't be started: "
                f"{refused or self._followers.refused}"
            )

    def stop(self, timeout: float) -> bool:
        """Take no more events, end the threads; return False if a user function still runs."""
        with self._lock:
            self._stopping = True
            self._queue.clear()
            threads = self._followers.stop()
        self.collecting.close()
        self._endpoint.wake()
        self._watch.stop()
        deadline = time.monotonic() + timeout
        me = threading.current_thread()
        for thread in [*threads, self._watchdog]:
            thread.join_if_started(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in threads if t is not me)

    # Work that comes in.

    def post(self, event: Event) -> None:
        """Add an event that did not come through the endpoint (a call to oneself)."""
        with self._lock:
            self._events.append(event)
            found = self._followers.find()
        if not found:
            self._endpoint.wake()  # the leader takes it, between others

    def submit(self, function: Function, depth: int = DEEPEST, caller: Hashable = None) -> None:
        """Run a user function: here and now if it may, else when there is a thread for it.

        Args:
            depth: of the call, see `function_queue`.
            caller: whose call it is; None for what this worker does by itself.
        """
        if not self.run_here(function, depth, caller):
            self.queue(function, depth, caller)

    def queue(self, function: Function, depth: int, caller: Hashable) -> None:
        """Run a user function in another thread, when there is one for it. See `submit`."""
        with self._lock:
            self._queue.push(function, depth, caller)
            # In this order: a thread that ends a function looks whether one is queued.
            if len(self._running) < self.max_running or self._places.may_run(caller):
                self._followers.find()
            self._watch.set_queue(True)

    def run_here(self, function: Function, depth: int, caller: Hashable) -> bool:
        """Run a user function now, if this is the leader and a place is free. See `submit`.

        Returns:
            False, without side effects, if it must not be run here.
        """
        me, running = threading.get_ident(), self._running
        with self._lock:
            has_place = len(running) < self.max_running or self._places.may_run(caller)
            is_next = not self._queue.size or not self._turns.is_any()
            here = has_place and is_next and self._leader == me and me not in running
            # Most often it may, and that takes no call of Python.
            if here and not (len(self._resting) > 1 and len(self._threads) <= self._queue.plenty):
                here = self._turns.may_leader_run(depth)
            if here:
                running[me] = depth, caller
                self._watch.begin()
        if here:
            if self.batch.is_on:
                self.batch.end()
            self._run(me, function)
        return here

    def _run(self, me: int, function: Function) -> None:
        try:
            isolation = self._isolations[me]
            isolation.state.run(isolation.context, function, isolation.put_back)
        except BaseException:
            logger.exception("%s: an internal error while serving a call", self._name)
        finally:
            if self._running.pop(me, None) is None:
                self._away.pop(me, None)  # it was in a wait of torch's when it was last looked at
            # In this order: a thread that queues a function then looks for a place.
            if self._queue.size:
                with self._lock:
                    if self._leader == me and self._turns.is_any():
                        self._followers.find()

    def allow_promotion(self) -> None:
        """Let the lead pass: all that needs order is done. No effect without the lead."""
        if self._leader == (me := threading.get_ident()):
            with self._lock:
                if self._leader == me:
                    self._watch.begin()

    def begin_completion(self) -> None:
        """Let the lead pass as `allow_promotion` does, before this thread completes a future."""
        if self._leader == (me := threading.get_ident()):
            with self._lock:
                if leads := self._leader == me:
                    self._watch.begin()
            if leads and self._in_a_row and not self.batch.is_on:
                self.batch.begin()

    def yield_to_batch(self) -> None:
        """See `CompletionBatch.yield_to`. The leader itself does not."""
        if self._leader != threading.get_ident():
            self.batch.yield_to()

    def may_wait_here(self, depth: int) -> bool:
        """Return whether the calling thread may run the callbacks of a call of this depth.

        They may wait. So a leader runs them only if there is a thread for it, as for a function.
        """
        if self._leader != threading.get_ident():
            return True
        with self._lock:
            may = self._turns.may_leader_run(depth)
            if may:
                self._place_of_callbacks = depth, None
                self._runs_callbacks = True
            return may

    # Waiting inside user functions.

    @property
    def running(self) -> int:
        """Return how many functions run, but for those that wait for farcall."""
        return len(self._running)

    def is_at_work(self) -> bool:
        """Return whether the calling thread leads or runs a function, so `waiting` has work."""
        # Of both the thread itself is the only one that makes them so.
        return (me := threading.get_ident()) == self._leader or me in self._running

    def waiting(self) -> AbstractContextManager[None]:
        """Wrap a wait for farcall: another thread leads and runs functions instead."""
        return Wait(self, threading.get_ident()) if self.is_at_work() else _NO_WAIT

    def leave(self, me: int) -> bool:
        """Let the calling thread wait. Return whether it runs a function, not a callback."""
        with self._lock:
            place = self._running.pop(me, None)
            leads = self._leader == me
            if place is not None or leads:
                self._away[me] = self._place_of_callbacks if place is None else place
            if leads:
                # Seldom: what waits here is no function, and did not ask by `may_wait_here`.
                if not self._followers.has_spare() and not self._followers.start(beyond=True):
                    self._watch.set_queue(True)  # so that the watchdog tries again
                self._pass_lead()
            elif place is not None and self._queue.size and self._turns.is_any():
                self._followers.find()
        return place is not None

    def come_back(self, me: int) -> None:
        """Note that the wait of a thread that runs a function is over."""
        with self._lock:
            self._running[me] = self._away.pop(me, OWN)

    def _pass_lead(self) -> None:
        """Leave the lead to a thread that rests, or was just started. Lock held."""
        self.batch.end()
        self._leader = 0
        self._runs_callbacks = False
        self._watch.end()
        self._followers.wake()

    def _has_free_leader(self) -> bool:
        """Return whether a thread leads that runs nothing of the user's. Lock held."""
        return bool(self._leader) and self._leader not in self._running and not self._runs_callbacks

    def _is_led(self) -> bool:
        """Return whether another thread leads, or could, while this one works. Lock held."""
        return self._has_free_leader() or self._followers.has_spare()

    def shortage(self) -> str:
        """See `Turns.shortage`."""
        return self._turns.shortage()

    # The threads.

    def _follow(self) -> None:
        me = threading.get_ident()
        woken: bool | None = True
        looked = False
        try:
            while woken is not None:
                woken, looked = self._do_something(me, woken), True
        finally:
            self._isolations.pop(me, None)
            with self._lock:
                self._followers.ended(woken=not looked)

    def _do_something(self, me: int, woken: bool) -> bool | None:
        """Run a queued function, lead, or rest.

        Args:
            woken: the thread was started or woken, and looks for work for the first time since.

        Returns:
            True if the thread has rested and was woken, False if it has worked, and None if it is
            to end.
        """
        function: Function | None = None
        event: Event | None = None
        bell: threading.Lock | None = None
        leads = has_left_event = False
        with self._lock:
            self._followers.waking -= woken
            if self._stopping:
                return None
            has_place = self._queue.size and self._places.is_any_free
            if (has_place or self._events) and self._is_led():
                taken = self._turns.take(is_led=self._has_free_leader()) if has_place else None
                if taken is not None:
                    function, depth, caller = taken
                    self._running[me] = depth, caller
                    if not self._queue.size:
                        self._watch.set_queue(False)
                # Else the leader takes it. Its handling may be a callback that waits.
                if (
                    function is None
                    and self._events
                    and self._queue.admits(1, self._places.taken())
                ):
                    event = self._events.popleft()
                    self._away[me] = OWN
            if function or event:
                pass
            elif self._leader:
                bell = self._followers.bell()
                has_left_event = bool(self._events)
            else:
                self._leader = me
                leads = True
            if (function or event) and not self._leader:
                self._followers.wake()
        has_work = function is not None or event is not None or leads
        if has_work and me not in self._isolations:
            self.handler.on_thread_start()
            self._isolations[me] = isolate_thread(self._floats)
        if function is not None:
            self._run(me, function)
        elif event is not None:
            self._source.handle(event)
            self._away.pop(me, None)
        elif leads:
            self._lead(me)
        else:
            if has_left_event:
                self._endpoint.wake()
            return (bell is not None and self._followers.sleep(bell)) or None
        return False

    def _lead(self, me: int) -> None:
        """Take and handle events until the lead is lost or the agent stops."""
        event: Event | None = None
        self._in_a_row = 0
        due = 0.0
        while not self._stopping:
            if event is not None:
                try:  # `EventSource.handle`, without a frame for each event
                    self.handler.handle(event)
                except BaseException:
                    self._source.log_handling(event)
                self._in_a_row += 1
            elif self.batch.is_on:
                self.batch.end()
            if event is None or self._in_a_row == MAX_IN_A_ROW:
                due = self._source.before_sleep()
                self._in_a_row = 0
            with self._lock:
                if self._leader != me:
                    self._away.pop(me, None)
                    return
                if self._runs_callbacks:
                    self._runs_callbacks = False
                    if self._queue.size:
                        self._followers.find()
                self._watch.end()
                event = self._events.popleft() if self._events else None
            if event is None and self._in_a_row:
                event = self._source.poll()
            elif event is None:
                event = self._source.next(0.0 if self.batch.is_on else due)
        with self._lock:
            if self._leader == me:
                self._leader = 0

    def _guard(self) -> None:
        """Pass the lead on when the leader is busy for too long: this thread is the watchdog."""
        while notice := self._watch.wait():
            self._followers.say_refused()
            if notice == Notice.STARVING:
                self._look_after_queue()
                continue
            with self._lock:
                overdue = self._leader and self._watch.is_overdue()
                passed = overdue and self._followers.has_spare()
                if passed:
                    if self._leader not in self._running:
                        self._away[self._leader] = self._place_of_callbacks
                    self._pass_lead()
            if overdue and not passed:
                time.sleep(PAUSE_SECONDS)

    def _discount_torch_waits(self) -> None:
        waiting = threads_in_torch_waits()
        with self._lock:
            for thread in waiting.intersection(list(self._running)):
                place = self._running.pop(thread, None)
                if place is not None:
                    self._away[thread] = place
                    self._followers.find()

    def _look_after_queue(self) -> None:
        """Functions are queued, and nothing ends."""
        if len(self._running) >= self.max_running:
            self._discount_torch_waits()
        with self._lock:
            if self._leader and not self._queue.size:
                self._watch.set_queue(False)
                return
            if self._leader and not self._turns.is_any():
                return
            if not self._followers.find():
                self._queue.held_at = time.monotonic()
        if self.shortage():
            self.handler.on_shortage()
