"""Only the leader says that its lead may pass: else two threads would take events at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from patience import PATIENCE

from farcall.runtime.threads.executor import Executor
from farcall.transport.watch import PollingWatch

CHANCE = 0.3  # seconds in which the watchdog may pass the lead, a few hundred times what it needs


class Slow(PollingWatch):
    """The thread that begins the watch for the second time is interrupted just before."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._begun = 0

    def begin(self) -> None:
        self._begun += 1
        if self._begun == 2:
            executor, me = self._group.executor, threading.get_ident()
            until = time.monotonic() + CHANCE
            while executor._leader == me and time.monotonic() < until:
                time.sleep(0.001)
            self._group.by_leader.append(executor._leader == me)
        super().begin()


class Group:
    """An executor whose endpoint has one event, and the handler of that."""

    def __init__(self, says: Callable[[Executor], object]) -> None:
        self.by_leader: list[bool] = []
        self.handled = threading.Event()
        self._says = says
        self._events = [1]
        self._ended = threading.Event()
        self.executor = Executor("w", self, self, max_running=2)  # type: ignore[arg-type]

    def new_watch(self) -> PollingWatch:
        return Slow(self)

    def poll(self) -> Any:
        return self._events.pop() if self._events else None

    def next(self, timeout: float | None) -> Any:
        if timeout != 0.0 and not self._events:
            self._ended.wait(PATIENCE)
        return self.poll()

    def wake(self) -> None:
        self._ended.set()

    def on_thread_start(self) -> None:
        pass

    def before_sleep(self) -> float:
        return math.inf

    def on_shortage(self) -> None:
        pass

    def handle(self, _: int) -> None:
        self.executor.allow_promotion()
        self._says(self.executor)
        self.handled.set()


def run_here(executor: Executor) -> None:
    executor.run_here(lambda: None, 1, None)


@pytest.mark.parametrize("says", [Executor.allow_promotion, Executor.begin_completion, run_here])
def test_a_thread_that_has_lost_the_lead_says_nothing(says: Callable[[Executor], object]) -> None:
    group = Group(says)
    group.executor.start()
    try:
        assert group.handled.wait(PATIENCE)
        # It lost the lead before it could say so, or it said so while none could take the lead.
        assert group.by_leader in ([], [True])
    finally:
        assert group.executor.stop(PATIENCE)


def test_the_leader_runs_queued_functions_first() -> None:
    executor = Group(lambda _: None).executor
    executor.max_running = executor._places.most = 1
    executor._leader = threading.get_ident()
    executor._running[-1] = 1, "caller"  # of another thread
    executor.queue(lambda: None, 1, "caller")
    # That function ends, and its thread has not yet looked for one that is queued.
    del executor._running[-1]
    assert not executor.run_here(lambda: None, 1, "caller")
    assert executor._queue.size == 1
