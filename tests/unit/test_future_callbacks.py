"""The order in which the callbacks of a future run, whichever thread adds or runs them."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from patience import PATIENCE

import farcall.runtime.calls.callbacks as module
from farcall.runtime.calls.future import Future, complete_with


@contextmanager
def completed_elsewhere(future: Future[int]) -> Iterator[None]:
    """Complete the future in another thread, which runs its callbacks and ends with the block."""
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
        overtaken.wait(0.05)  # in vain, if no callback overtakes
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


# Chains.


def waits(done: Any) -> Any:
    return done.wait()


@pytest.mark.parametrize("callback", [waits, lambda done: done.value()])
def test_a_chain_of_any_length_completes(callback: Any) -> None:
    head: Future[int] = Future()
    last = head
    for _ in range(10_000):
        last = last.then(callback)
    head.set_result(7)
    assert last.wait() == 7


def test_the_error_of_the_head_passes_a_chain_of_any_length() -> None:
    head: Future[int] = Future()
    last = head
    for _ in range(2 * sys.getrecursionlimit()):  # a raise at each is dearer than a value
        last = last.then(waits)
    head.set_exception(KeyError("head"))
    with pytest.raises(KeyError, match="head"):
        last.wait()


def test_the_stack_in_a_chain_is_of_constant_depth() -> None:
    depths = []

    def note(done: Any) -> None:
        depth, frame = 0, inspect.currentframe()
        while frame is not None:
            depth, frame = depth + 1, frame.f_back
        depths.append(depth)

    head: Future[None] = Future()
    last = head
    for _ in range(1000):
        last = last.then(note)
    head.set_result(None)
    last.wait()
    assert len(depths) == 1000
    assert max(depths) == max(depths[:100])


def test_a_chain_that_no_code_completes_can_be_dropped() -> None:
    head: Future[None] = Future()
    last = head
    for _ in range(10_000):
        last = last.then(waits)
    del head, last


@pytest.mark.parametrize(
    "error", [RecursionError(), MemoryError(), SystemExit(1), KeyboardInterrupt(), GeneratorExit()]
)
def test_whatever_a_callback_raises_completes_the_future_behind_it(error: BaseException) -> None:
    def fail(_: Any) -> None:
        raise error

    future: Future[None] = Future()
    behind = future.then(fail)
    further = behind.then(waits)
    future.set_result(None)
    for one in (behind, further):
        with pytest.raises(type(error)):
            one.wait()


def test_a_callback_that_fills_the_stack_completes_the_future_behind_it() -> None:
    def deeper(depth: int, future: Future[Any]) -> None:
        if depth:
            deeper(depth - 1, future)
        else:
            future.set_result(None)

    # With less room torch can't even begin a callback, and may crash while it formats that error.
    left = room()
    for depth in range(left - 74, left - 26):
        future: Future[None] = Future()
        behind = future.then(lambda _: recurse()).then(waits)
        try:
            deeper(depth, future)
        except RecursionError:
            break
        assert behind.done()
        assert type(behind.exception()) is RecursionError


def recurse() -> None:
    recurse()


def room() -> int:
    """Return how many calls the stack has room for: C's calls take some, and show no frame."""
    try:
        return 1 + room()
    except RecursionError:
        return 1


def test_a_callback_may_wait_for_a_future_that_a_later_callback_completes() -> None:
    """Queue the later callback in the thread that waits."""
    head: Future[None] = Future()
    last: Future[Any] = head
    reached = []

    def complete_and_wait(_: Any) -> int:
        inner: Future[int] = Future()
        behind = inner.then(lambda done: done.value() + 1)
        inner.set_result(1)
        reached.append(behind.wait())
        return reached[-1]

    for _ in range(50):
        last = last.then(complete_and_wait)
    head.set_result(None)
    assert last.wait() == 2
    assert reached == [2] * 50


def test_a_callback_that_raises_keeps_no_other_from_running() -> None:
    def fail(_: Any) -> None:
        raise SystemExit(1)

    future: Future[None] = Future()
    ran = []
    future.add_done_callback(fail)
    future.add_done_callback(lambda _: ran.append(1))
    future.set_result(None)
    assert ran == [1]


def test_callbacks_can_be_taken_back() -> None:
    future: Future[None] = Future()
    ran = []

    def callback(_: Any) -> None:
        ran.append(1)

    future.add_done_callback(callback)
    future.add_done_callback(callback)
    assert future.remove_done_callback(callback) == 2
    assert future.remove_done_callback(callback) == 0
    future.set_result(None)
    assert ran == []


# asyncio.


async def complete_soon(futures: list[Future[int]]) -> None:
    for number, future in enumerate(futures):
        threading.Timer(0, future.set_result, (number,)).start()


def test_asyncio_takes_futures_of_calls() -> None:
    async def use() -> None:
        futures: list[Future[int]] = [Future() for _ in range(3)]
        await complete_soon(futures)
        done, pending = await asyncio.wait(futures)
        assert (done, pending) == (set(futures), set())
        assert await asyncio.gather(*futures) == [0, 1, 2]
        assert await asyncio.wait_for(futures[1], PATIENCE) == 1
        assert sorted([await one for one in asyncio.as_completed(futures)]) == [0, 1, 2]

        late: Future[int] = Future()
        done, pending = await asyncio.wait([late, *futures], return_when=asyncio.FIRST_COMPLETED)
        assert late in pending
        failed: Future[int] = Future()
        threading.Timer(0, failed.set_exception, (KeyError("f"),)).start()
        done, pending = await asyncio.wait([late, failed], return_when=asyncio.FIRST_EXCEPTION)
        assert (done, pending) == ({failed}, {late})
        done, pending = await asyncio.wait([late], timeout=0)
        assert (done, pending) == (set(), {late})

    asyncio.run(use())


def test_the_text_of_a_future_says_how_it_stands() -> None:
    future: Future[int] = Future()
    assert repr(future) == "<farcall Future pending>"
    assert "pending made at" in repr(future.then(waits))
    future.set_result(1)
    assert repr(future) == "<farcall Future done>"
    failed: Future[int] = Future()
    failed.set_exception(KeyError("f"))
    assert repr(failed) == "<farcall Future failed with KeyError>"
    assert failed.exception() is not None  # looked at


class Overtaken(Future[int]):
    """A future that another thread completes as soon as one has seen that it is not done."""

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self._set_result(1)
        return was_done


def test_a_future_that_another_thread_completes_first_keeps_its_value() -> None:
    future = Overtaken()
    complete_with(future, ValueError("too late"))
    assert future.value() == 1
