"""`Executor.yield_to_batch`: threads stand back while the leader completes a batch of futures."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE

from farcall.runtime.threads import completion_batch
from farcall.runtime.threads.executor import MAX_IN_A_ROW, Executor
from farcall.transport.watch import PollingWatch


class Blind(PollingWatch):
    """Notices nothing: else the lead would pass when the machine is busy."""

    def begin(self) -> None:
        pass


class Leader:
    """An executor whose endpoint has some answers in a row, and then none."""

    def __init__(self, answers: int) -> None:
        self.executor = Executor("w", self, self, max_running=2)  # type: ignore[arg-type]
        self.second: Callable[[], None] = lambda: None  # what to do at the second of them
        self.log: list[Any] = []
        self.finished = threading.Event()
        self._answers = list(range(1, answers + 1))
        self._ended = threading.Event()

    def run(self) -> list[Any]:
        self.executor.start()
        assert self.finished.wait(PATIENCE)
        return self.log

    def end(self) -> None:
        assert self.executor.stop(PATIENCE)

    # The endpoint.

    def new_watch(self) -> PollingWatch:
        return Blind()

    def poll(self) -> Any:
        return self._answers.pop(0) if self._answers else None

    def next(self, timeout: float | None) -> Any:
        if timeout != 0.0 and self.executor.batch.is_on:
            self.log.append("sleeps, and lets others stand back")
        if timeout != 0.0 and not self._answers:
            self.finished.set()
            self._ended.wait(PATIENCE)
        return self.poll()

    def wake(self) -> None:
        self._ended.set()

    # The handler.

    def on_thread_start(self) -> None:
        pass

    def before_sleep(self) -> float:
        return math.inf

    def handle(self, answer: int) -> None:
        self.executor.begin_completion()
        self.log.append((answer, self.executor.batch.is_on))
        if answer == 2:
            self.second()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Leader]]:
    monkeypatch.setattr(completion_batch, "STAND_BACK", PATIENCE)
    made = []

    def start(answers: int) -> Leader:
        made.append(Leader(answers))
        return made[-1]

    yield start
    for one in made:
        one.end()


@pytest.fixture
def leader(start: Callable[[int], Leader]) -> Leader:
    return start(3)


def test_one_answer_is_no_batch(leader: Leader) -> None:
    assert leader.run() == [(1, False), (2, True), (3, True)]
    assert not leader.executor.batch.is_on


@pytest.mark.parametrize("answers", [MAX_IN_A_ROW, MAX_IN_A_ROW + 1, 2 * MAX_IN_A_ROW])
def test_a_long_batch_has_an_end(start: Callable[[int], Leader], answers: int) -> None:
    leader = start(answers)
    assert leader.run() == [(answer, answer > 1) for answer in range(1, answers + 1)]
    assert not leader.executor.batch.is_on


def test_a_thread_goes_on_after_the_last_answer(leader: Leader) -> None:
    def stand_back() -> None:
        assert leader.executor.batch.is_on
        started.set()
        leader.executor.yield_to_batch()
        leader.log.append("went on")

    started = threading.Event()
    thread = threading.Thread(target=stand_back)

    def begin() -> None:
        thread.start()
        assert started.wait(PATIENCE)

    leader.second = begin
    leader.run()
    thread.join(PATIENCE)
    assert leader.log == [(1, False), (2, True), (3, True), "went on"]


def test_the_leader_does_not_wait_for_itself(leader: Leader) -> None:
    def call_in_callback() -> None:
        leader.executor.yield_to_batch()
        leader.log.append(leader.executor.batch.is_on)

    leader.second = call_in_callback
    assert leader.run() == [(1, False), (2, True), True, (3, True)]


def test_no_thread_waits_for_long(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_batch, "STAND_BACK", 0.0)

    def callback_that_waits_for_a_caller() -> None:
        thread = threading.Thread(target=leader.executor.yield_to_batch)
        thread.start()
        thread.join(PATIENCE)
        leader.log.append((thread.is_alive(), leader.executor.batch.is_on))

    leader.second = callback_that_waits_for_a_caller
    assert leader.run() == [(1, False), (2, True), (False, False), (3, True)]


def test_no_thread_waits_while_a_function_runs(leader: Leader) -> None:
    def look() -> None:
        leader.log.append(("function", leader.executor.batch.is_on))

    leader.second = lambda: leader.executor.submit(look)
    assert leader.run()[:3] == [(1, False), (2, True), ("function", False)]


def test_no_thread_waits_for_a_leader_that_waits(leader: Leader) -> None:
    def wait() -> None:
        with leader.executor.waiting():
            leader.log.append(("waits", leader.executor.batch.is_on))

    leader.second = wait
    assert ("waits", False) in leader.run()
