"""`Executor.let_complete`: threads stand back while the leader completes a row of futures."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE

from farcall.runtime.threads import completion_row
from farcall.runtime.threads.executor import MAX_IN_A_ROW, Executor
from farcall.transport.watch import Watch


class Blind(Watch):
    """Notices nothing: else the lead would pass when the machine is busy."""

    def begin(self) -> None:
        pass


class Row:
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

    def new_watch(self) -> Watch:
        return Blind()

    def poll(self) -> Any:
        return self._answers.pop(0) if self._answers else None

    def next(self, timeout: float | None) -> Any:
        if timeout != 0.0 and self.executor.row.is_on:
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
        self.executor.completes()
        self.log.append((answer, self.executor.row.is_on))
        if answer == 2:
            self.second()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Row]]:
    monkeypatch.setattr(completion_row, "STAND_BACK", PATIENCE)
    rows = []

    def start(answers: int) -> Row:
        rows.append(Row(answers))
        return rows[-1]

    yield start
    for row in rows:
        row.end()


@pytest.fixture
def row(start: Callable[[int], Row]) -> Row:
    return start(3)


def test_one_answer_is_no_row(row: Row) -> None:
    assert row.run() == [(1, False), (2, True), (3, True)]
    assert not row.executor.row.is_on


@pytest.mark.parametrize("answers", [MAX_IN_A_ROW, MAX_IN_A_ROW + 1, 2 * MAX_IN_A_ROW])
def test_a_long_row_has_an_end(start: Callable[[int], Row], answers: int) -> None:
    row = start(answers)
    assert row.run() == [(answer, answer > 1) for answer in range(1, answers + 1)]
    assert not row.executor.row.is_on


def test_a_thread_goes_on_after_the_last_answer(row: Row) -> None:
    def stand_back() -> None:
        assert row.executor.row.is_on
        started.set()
        row.executor.let_complete()
        row.log.append("went on")

    started = threading.Event()
    thread = threading.Thread(target=stand_back)

    def begin() -> None:
        thread.start()
        assert started.wait(PATIENCE)

    row.second = begin
    row.run()
    thread.join(PATIENCE)
    assert row.log == [(1, False), (2, True), (3, True), "went on"]


def test_the_leader_does_not_wait_for_itself(row: Row) -> None:
    def call_in_callback() -> None:
        row.executor.let_complete()
        row.log.append(row.executor.row.is_on)

    row.second = call_in_callback
    assert row.run() == [(1, False), (2, True), True, (3, True)]


def test_no_thread_waits_for_long(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_row, "STAND_BACK", 0.0)

    def callback_that_waits_for_a_caller() -> None:
        thread = threading.Thread(target=row.executor.let_complete)
        thread.start()
        thread.join(PATIENCE)
        row.log.append((thread.is_alive(), row.executor.row.is_on))

    row.second = callback_that_waits_for_a_caller
    assert row.run() == [(1, False), (2, True), (False, False), (3, True)]


def test_no_thread_waits_while_a_function_runs(row: Row) -> None:
    def look() -> None:
        row.log.append(("function", row.executor.row.is_on))

    row.second = lambda: row.executor.submit(look)
    assert row.run()[:3] == [(1, False), (2, True), ("function", False)]


def test_no_thread_waits_for_a_leader_that_waits(row: Row) -> None:
    def wait() -> None:
        with row.executor.waiting():
            row.log.append(("waits", row.executor.row.is_on))

    row.second = wait
    assert ("waits", False) in row.run()
