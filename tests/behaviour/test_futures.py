"""Futures of `rpc_async`: torch futures that can be awaited and lose no error."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE, Box, Gate, echo, fail_with, in_threads, wait_at, wait_until
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


def increment(future: torch.futures.Future[int]) -> int:
    return future.wait() + 1


@pytest.fixture
def complaints() -> Iterator[Box]:
    """Log records of failures that were never retrieved."""
    gc.collect()  # those of earlier tests are none of this one's
    box = Box()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "never looked at" in record.getMessage():
                box.put(record)

    collector = Collector()
    logger = logging.getLogger("farcall")
    logger.addHandler(collector)
    yield box
    logger.removeHandler(collector)


def test_it_is_a_torch_future(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))
    assert isinstance(future, torch.futures.Future)
    assert not future.done()
    gate.open()
    assert future.wait() == 5
    assert future.done()
    assert future.value() == 5
    assert future.wait() == 5


def test_then_chains(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))
    chained = future.then(increment).then(increment)
    assert isinstance(chained, torch.futures.Future)
    assert not chained.done()
    gate.open()
    assert chained.wait() == 7
    assert future.then(increment).wait() == 6  # of a future that is done already


def test_then_sees_the_failure_of_the_call(pair: list[Agent]) -> None:
    future = rpc.rpc_async("w1", fail_with, args=(KeyError("gone"),))
    with pytest.raises(KeyError, match="gone"):
        future.then(increment).then(increment).wait()

    def recover(future: torch.futures.Future[Any]) -> str:
        with pytest.raises(KeyError):
            future.value()
        return "recovered"

    assert future.then(recover).wait() == "recovered"


def test_an_error_in_a_then_callback_is_the_result(pair: list[Agent]) -> None:
    def fail(_: Any) -> None:
        raise FileNotFoundError(2, "in the callback", "name")

    with pytest.raises(FileNotFoundError) as raised:
        rpc.rpc_async("w1", echo, args=(1,)).then(fail).wait()
    assert raised.value.filename == "name"


def test_a_then_callback_may_call_again(pair: list[Agent]) -> None:
    def call_again(future: torch.futures.Future[int]) -> int:
        return int(rpc.rpc_sync("w1", echo, args=(future.wait() + 1,)))

    future = rpc.rpc_async("w1", echo, args=(1,))
    for _ in range(5):
        future = future.then(call_again)
    assert future.wait() == 6


def test_a_then_callback_acts_as_the_worker_that_made_the_call(
    pair: list[Agent], gate: Gate
) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate,))
    name = future.then(lambda _: rpc.get_worker_info().name)
    gate.open()
    assert name.wait() == "w0"


def test_done_callbacks_run_once_with_the_future(pair: list[Agent], gate: Gate) -> None:
    box = Box()
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))
    future.add_done_callback(lambda done: box.put((done is future, done.value())))
    future.add_done_callback(lambda done: box.put((done is future, done.value())))
    assert box.things == []
    gate.open()
    assert box.wait_for(2) == [(True, 5)] * 2
    future.add_done_callback(lambda done: box.put("late"))
    assert box.things == [(True, 5), (True, 5), "late"]


def test_collect_all_and_wait_all(pair: list[Agent], gate: Gate) -> None:
    futures = [rpc.rpc_async("w1", wait_at, args=(gate, i)) for i in range(10)]
    collected = torch.futures.collect_all(futures)
    assert not collected.done()
    gate.open()
    assert [future.wait() for future in collected.wait()] == list(range(10))
    assert torch.futures.wait_all(futures) == list(range(10))


def test_collect_all_and_wait_all_raise_the_error_of_a_call(pair: list[Agent]) -> None:
    futures = [
        rpc.rpc_async("w1", echo, args=(1,)),
        rpc.rpc_async("w1", fail_with, args=(KeyError("gone"),)),
    ]
    with pytest.raises(KeyError, match="gone"):
        torch.futures.wait_all(futures)
    with pytest.raises(KeyError, match="gone"):
        torch.futures.collect_all(futures).wait()


def test_many_threads_may_wait_for_one_future(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))
    with in_threads(*[future.wait] * 8) as results:
        gate.open()
    assert results == [5] * 8


# asyncio.


async def _await(*futures: rpc.Future[Any]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), PATIENCE)


async def _one(future: rpc.Future[Any]) -> Any:
    return await future


def test_it_can_be_awaited(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))

    async def main() -> Any:
        task = asyncio.ensure_future(_one(future))
        await asyncio.sleep(0)
        assert not task.done()
        gate.open()
        return await asyncio.wait_for(task, PATIENCE)

    assert asyncio.run(main()) == 5
    assert asyncio.run(_one(future)) == 5  # done already, and in another loop


def test_many_can_be_gathered(pair: list[Agent]) -> None:
    async def main() -> list[Any]:
        calls = [_one(rpc.rpc_async("w1", echo, args=(i,))) for i in range(200)]
        return await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)

    assert asyncio.run(main()) == list(range(200))


def test_awaiting_raises_the_error_of_the_call(pair: list[Agent]) -> None:
    async def main() -> Any:
        await rpc.rpc_async("w1", fail_with, args=(KeyError("gone"),))

    with pytest.raises(KeyError, match="gone"):
        asyncio.run(main())


def test_the_event_loop_runs_on_while_a_call_is_awaited(pair: list[Agent], gate: Gate) -> None:
    async def main() -> Any:
        future = asyncio.ensure_future(_one(rpc.rpc_async("w1", wait_at, args=(gate, 5))))
        quick = await asyncio.wait_for(_one(rpc.rpc_async("w1", echo, args=(1,))), PATIENCE)
        assert not future.done()
        gate.open()
        return quick, await asyncio.wait_for(future, PATIENCE)

    assert asyncio.run(main()) == (1, 5)


def test_cancelling_the_task_that_awaits_cancels_the_future(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))

    async def main() -> None:
        task = asyncio.ensure_future(_one(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert future.cancelled()
    with pytest.raises(rpc.Cancelled):
        future.wait()


# No error disappears.


def test_collect_all_may_outlive_the_futures(
    pair: list[Agent], gate: Gate, complaints: Box
) -> None:
    collected = torch.futures.collect_all(
        [
            rpc.rpc_async("w1", wait_at, args=(gate,)).then(lambda _: fail_with(KeyError("gone"))),
            rpc.rpc_async("w1", wait_at, args=(gate,)),
        ]
    )
    gc.collect()
    gate.open()
    with pytest.raises(KeyError, match="gone"):
        collected.wait()
    del collected
    gc.collect()
    assert complaints.things == []


def make_failing_and_drop() -> None:
    rpc.rpc_async("w1", fail_with, args=(KeyError("lost error"),))


def test_a_failure_that_no_code_looked_at_is_logged_with_its_place(
    pair: list[Agent], complaints: Box
) -> None:
    make_failing_and_drop()
    (record,) = complaints.wait_for()
    assert record.name == "farcall"
    assert record.levelno == logging.ERROR
    assert f"{__file__}:" in record.getMessage()
    assert "make_failing_and_drop" in record.getMessage()
    assert "KeyError: 'lost error'" in record.getMessage()
    assert "in fail_with" in record.getMessage()  # the remote traceback


def test_a_chain_that_fails_unseen_is_logged_once(pair: list[Agent], complaints: Box) -> None:
    rpc.rpc_async("w1", fail_with, args=(KeyError("lost error"),)).then(increment).then(increment)
    # The thread that completes them holds them for a moment.
    wait_until(lambda: gc.collect() >= 0 and bool(complaints.things))
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
    gc.collect()
    assert len(complaints.things) == 1


def test_a_future_that_failed_is_freed(pair: list[Agent]) -> None:
    ended = Box()

    def work() -> None:
        future = rpc.rpc_async("w1", fail_with, args=(KeyError("gone"),))
        chained = future.then(increment)
        weakref.finalize(future, ended.put, "future")
        weakref.finalize(chained, ended.put, "chained")
        for waiting in (future, chained):
            with pytest.raises(KeyError):
                waiting.wait()

    work()
    # The thread that completed it may hold it for a moment still.
    wait_until(lambda: gc.collect() >= 0 and len(ended.things) == 2)


@pytest.mark.parametrize("look", ["wait", "value", "then", "await", "wait_all", "collect_all"])
def test_a_failure_that_some_code_looked_at_is_not_logged(
    pair: list[Agent], complaints: Box, look: str
) -> None:
    def look_at(future: rpc.Future[Any]) -> Any:
        match look:
            case "wait":
                return future.wait()
            case "value":
                future.add_done_callback(lambda _: None)
                torch.futures.Future.wait(future)
                return future.value()
            case "then":
                return future.then(lambda f: f.value()).wait()
            case "await":
                return asyncio.run(_one(future))
            case "wait_all":
                return torch.futures.wait_all([future])
            case _:
                return torch.futures.collect_all([future]).wait()

    with pytest.raises(KeyError):
        look_at(rpc.rpc_async("w1", fail_with, args=(KeyError("gone"),)))
    gc.collect()
    assert complaints.things == []


def test_a_value_that_no_code_looked_at_is_not_logged(pair: list[Agent], complaints: Box) -> None:
    for value in range(5):
        rpc.rpc_async("w1", echo, args=(value,))
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
    gc.collect()
    assert complaints.things == []


def test_futures_of_two_workers_can_be_waited_for_together(trio: list[Agent]) -> None:
    def calls(agent: Agent) -> list[rpc.Future[int]]:
        with acting_as(agent):
            return [rpc.rpc_async("w2", echo, args=(i,)) for i in range(5)]

    futures = calls(trio[0]) + calls(trio[1])
    assert torch.futures.wait_all(futures) == [*range(5), *range(5)]
    with in_threads(functools.partial(torch.futures.wait_all, futures)) as results:
        pass
    assert results == [[*range(5), *range(5)]]
