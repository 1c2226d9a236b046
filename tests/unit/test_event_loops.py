"""Event loops of asyncio that a coroutine or a callback blocks, as `farcall stacks` names them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
from patience import PATIENCE

from farcall import rpc
from farcall.monitor import AskResult, SilentWorker, explain
from farcall.runtime.inspection import threads
from farcall.runtime.inspection.reports import CallReport, LoopReport, ThreadReport, WorkerReport

LINES = 5  # of the output in which the cause has to be
NAME = "loop of a test"
Loop = asyncio.AbstractEventLoop


async def nothing() -> None:
    pass


def in_loop(found: LoopReport | None) -> LoopReport:
    assert found is not None
    return found


def look() -> LoopReport | None:
    [found] = [one for one in threads.reports(threads.look(), {}) if one.name == NAME]
    return found.loop


def first() -> LoopReport:
    """Return the loop's report as soon as the loop makes its first call."""
    end = time.monotonic() + PATIENCE
    while (found := look()) is None and time.monotonic() < end:
        pass
    return in_loop(found)


@contextmanager
def running(*callbacks: Callable[[], object]) -> Iterator[Loop]:
    """Run an event loop in a thread of its own, which first calls these functions."""
    loop = asyncio.new_event_loop()
    for callback in callbacks:
        loop.call_soon_threadsafe(callback)
    thread = threading.Thread(target=loop.run_forever, name=NAME)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def blocked(prepare: Callable[[], Awaitable[object]] = nothing) -> Iterator[Loop]:
    """Run an event loop that a coroutine blocks as soon as it has awaited `prepare`."""
    has_begun, may_end = threading.Event(), threading.Event()

    async def block() -> object:
        prepared = await prepare()
        has_begun.set()
        may_end.wait(PATIENCE)
        return prepared

    with running() as loop:
        blocks = asyncio.run_coroutine_threadsafe(block(), loop)
        assert has_begun.wait(PATIENCE)
        try:
            yield loop
        finally:
            may_end.set()
            task = blocks.result(PATIENCE)
            if isinstance(task, asyncio.Task):
                asyncio.run_coroutine_threadsafe(asyncio.wait([task]), loop).result(PATIENCE)


def submit(loop: Loop) -> None:
    asyncio.run_coroutine_threadsafe(nothing(), loop)


def call_back(loop: Loop) -> None:
    loop.call_soon_threadsafe(int)


@pytest.mark.parametrize("add", [submit, call_back])
def test_those_that_come_while_a_loop_is_blocked_wait(add: Callable[[Loop], None]) -> None:
    with blocked() as loop:
        for _ in range(3):
            add(loop)
        found = in_loop(look())
        assert found.ready == 3
        assert found.place.endswith("block: may_end.wait(PATIENCE)")
        assert __file__ in found.place
        assert in_loop(look()).seconds > found.seconds >= 0


def test_a_coroutine_whose_future_is_done_waits() -> None:
    future: rpc.Future[int] = rpc.Future()

    async def wait_for_it() -> int:
        return await future

    async def prepare() -> object:
        task = asyncio.ensure_future(wait_for_it())
        await asyncio.sleep(0)  # it awaits the future now
        return task

    with blocked(prepare):
        assert in_loop(look()).ready == 0
        future.set_result(7)
        assert in_loop(look()).ready == 1


def test_a_coroutine_whose_sleep_is_over_waits() -> None:
    async def prepare() -> object:
        task = asyncio.ensure_future(asyncio.sleep(1e-3))
        await asyncio.sleep(0)  # it sleeps now
        return task

    with blocked(prepare):
        end = time.monotonic() + PATIENCE
        while in_loop(look()).ready == 0 and time.monotonic() < end:
            pass
        assert in_loop(look()).ready == 1


def test_cancelled_timers_and_those_not_yet_due_do_not_wait() -> None:
    async def prepare() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(3600, int)
        loop.call_soon(int).cancel()
        loop.call_at(loop.time() - 1, int).cancel()

    with blocked(prepare):
        assert in_loop(look()).ready == 0


def test_a_callback_in_c_blocks_as_well() -> None:
    lock = threading.Lock()
    lock.acquire()
    with running(lock.acquire, int):
        try:
            found = first()
        finally:
            lock.release()
    assert found.ready == 1
    assert "in Handle._run" in found.place


def test_a_loop_that_looks_for_events_is_not_blocked() -> None:
    with running() as loop:
        asyncio.run_coroutine_threadsafe(nothing(), loop).result(PATIENCE)
        end = time.monotonic() + PATIENCE
        while look() is not None and time.monotonic() < end:
            pass
        assert look() is None


CALL = CallReport("f", "w9", 1, 7.0, 60.0, "flies")


def worker(name: str, loop: LoopReport | None, waits_for: CallReport | None = None) -> WorkerReport:
    thread = ThreadReport("MainThread", 1, ["f"], "f", None, waits_for, None, loop)
    calls = [] if waits_for is None else [waits_for]
    return WorkerReport(
        name, 0, 0, "", 1, "", 9.0, 1, (1, 0), state="works", calls=calls, threads=[thread]
    )


def of(name: str, count: str) -> str:
    thread = f"the event loop of thread MainThread of {name}"
    return f"{thread} is blocked since 3 s, {count}: it is at a.py"


def test_a_blocked_loop_is_named_if_others_wait_long_enough() -> None:
    loops = {"a": (3.0, 1), "b": (3.0, 2), "c": (0.5, 2), "d": (3.0, 0)}
    reports = [worker(name, LoopReport("a.py", *loop)) for name, loop in loops.items()]
    lines = explain(AskResult(reports, []))
    assert lines == [of("a", "1 coroutine waits"), of("b", "2 coroutines wait")]


def test_a_blocked_loop_is_named_early_among_many_causes() -> None:
    silent = [SilentWorker(0, f"s{one}", "it does not answer", "") for one in range(9)]
    reports = [worker(f"c{one}", None, CALL) for one in range(9)]
    lines = explain(AskResult([*reports, worker("a", LoopReport("a.py", 3.0, 2))], silent))
    assert of("a", "2 coroutines wait") in lines[:LINES]
    assert len(lines) == 19


def test_a_loop_blocked_by_a_call_comes_after_the_cause_of_that() -> None:
    reports = [worker(f"w{one}", LoopReport("a.py", 3.0, 2), CALL) for one in range(9)]
    lines = explain(AskResult(reports, []))
    assert lines[0].startswith("w0 waits for `f` on w9 since 7 s")
    assert of("w0", "2 coroutines wait") in lines[:LINES]
    assert len(lines) == 18
