"""The order in which the callbacks of a future run, whichever thread adds or runs them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import farcall.runtime.future as module
from farcall.runtime.future import Future

PATIENCE = 30.0  # seconds; only a test that fails waits for so long


@contextmanager
def completed_elsewhere(future: Future[int]) -> Iterator[None]:
    """Another thread completes the future, runs its callbacks, and ends with the block."""
    thread = threading.Thread(target=future.set_result, args=(1,))
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks that wait for nothing stop the test."""
    monkeypatch.setattr(module, "STAND_BACK", 1e6)


def test_one_added_while_another_thread_runs_those_before_it_comes_after_them(
    patient: None,
) -> None:
    future: Future[int] = Future()
    begun, overtaken = threading.Event(), threading.Event()
    ran = []

    def first(_: Any) -> None:
        begun.set()
        overtaken.wait(0.05)  # whom nobody overtakes waits in vain
        ran.append("first")

    def last(_: Any) -> str:
        ran.append("last")
        overtaken.set()
        return "result of the last"

    future.add_done_callback(first)
    future.add_done_callback(lambda _: ran.append("second"))
    with completed_elsewhere(future):
        assert begun.wait(PATIENCE)
        assert future.done()
        assert future.then(last).wait() == "result of the last"
    assert ran == ["first", "second", "last"]


def test_one_that_a_callback_adds_runs_at_once(patient: None) -> None:
    future: Future[int] = Future()
    ran = []

    def first(_: Any) -> None:
        future.then(lambda _: ran.append("inner")).wait()
        ran.append("first")

    future.add_done_callback(first)
    future.add_done_callback(lambda _: ran.append("second"))
    with completed_elsewhere(future):
        pass
    assert ran == ["inner", "first", "second"]


def test_callbacks_that_wait_for_each_other_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAND_BACK", 0.01)
    future: Future[int] = Future()
    begun, added = threading.Event(), threading.Event()
    ran = []

    def first(_: Any) -> None:
        begun.set()
        ran.append(added.wait(PATIENCE))

    future.add_done_callback(first)
    with completed_elsewhere(future):
        assert begun.wait(PATIENCE)
        future.add_done_callback(lambda _: added.set())
    assert ran == [True]


def test_one_that_raised_lets_the_next_run(patient: None) -> None:
    future: Future[int] = Future()
    begun, go_on = threading.Event(), threading.Event()

    def first(_: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        raise ValueError("from the first")

    chained = future.then(first)
    with completed_elsewhere(future):
        assert begun.wait(PATIENCE)
        go_on.set()
        assert future.then(lambda done: done.value() + 1).wait() == 2
    with pytest.raises(ValueError, match="from the first"):
        chained.wait()


def test_a_task_does_not_wait_for_callbacks(patient: None) -> None:
    future: Future[int] = Future()
    begun, go_on = threading.Event(), threading.Event()

    def first(_: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    async def look() -> int:
        value = await future
        go_on.set()
        return value

    future.add_done_callback(first)
    with completed_elsewhere(future):
        assert begun.wait(PATIENCE)
        assert asyncio.run(look()) == 1


def test_one_waits_only_while_it_is_added(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[int] = Future()
    slow_begun, go_on = threading.Event(), threading.Event()
    ran = []
    add = torch.futures.Future.add_done_callback

    def add_slowly(self: Future[int], callback: Any) -> None:
        if threading.current_thread() is slow:
            slow_begun.set()
            assert go_on.wait(PATIENCE)
        add(self, callback)

    monkeypatch.setattr(torch.futures.Future, "add_done_callback", add_slowly)
    slow = threading.Thread(target=future.then, args=(lambda _: ran.append("slow"),))
    slow.start()
    assert slow_begun.wait(PATIENCE)
    future.add_done_callback(lambda _: ran.append("fast"))
    future.set_result(1)  # has only the fast one
    assert ran == ["fast"]
    go_on.set()
    slow.join(PATIENCE)
    assert ran == ["fast", "slow"]


def test_many_threads_may_add(patient: None) -> None:
    future: Future[int] = Future()
    count, rounds = 4, 50
    ran: list[list[int]] = [[] for _ in range(count)]
    start = threading.Barrier(count + 1)

    def add(of: list[int]) -> None:
        start.wait(PATIENCE)
        for number in range(rounds):
            future.add_done_callback(lambda _, number=number: of.append(number))

    threads = [threading.Thread(target=add, args=(of,)) for of in ran]
    for thread in threads:
        thread.start()
    start.wait(PATIENCE)
    future.set_result(1)
    for thread in threads:
        thread.join(PATIENCE)
    assert ran == [list(range(rounds))] * count
    assert future._callbacks == []
