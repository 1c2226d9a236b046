"""`Future.cancel`, asyncio's cancellation, and `rpc.cancelled` in the function that is called."""

from __future__ import annotations

import asyncio
import math
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE, Box, Gate, until_begun, wait_at
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.runtime.calls.retrying import RepeatedCall
from farcall.supervision.following import _FollowingCall
from farcall.transport.base import Link
from farcall.wire.frames import Frame

LONG = 2 * PATIENCE  # a deadline that ends nothing here


class Worker:
    def __init__(self) -> None:
        self.count = 0

    def wait(self, gate: Gate) -> int:
        return gate.wait()

    def add(self) -> int:
        self.count += 1
        return self.count


def until_cancelled(started: Gate, ended: Box) -> None:
    """Run until the caller has cancelled the call."""
    started.announce()
    waiting = threading.Event()
    while not rpc.cancelled():
        waiting.wait(0.005)
    ended.put(rpc.get_worker_info().name)


def by_sync(started: Gate, ended: Box, box: Box) -> None:
    try:
        rpc.rpc_sync("w2", until_cancelled, args=(started, ended), timeout=LONG)
        rpc.rpc_sync("w2", operator.add, args=(1, 2))  # a call after that is cancelled, too
    except BaseException as error:
        box.put(error)


def by_async(started: Gate, ended: Box, box: Box) -> None:
    try:
        rpc.rpc_async("w2", until_cancelled, args=(started, ended), timeout=LONG).wait()
    except BaseException as error:
        box.put(error)


@rpc.functions.async_execution
def by_future(started: Gate, ended: Box, box: Box) -> torch.futures.Future[None]:
    made = rpc.rpc_async("w2", until_cancelled, args=(started, ended), timeout=LONG)
    made.add_done_callback(lambda future: box.put(rpc.Cancelled("as a future")))
    return made


@rpc.functions.async_execution
def never(started: Gate) -> rpc.Future[None]:
    started.announce()
    return rpc.Future()


def by_sync_of_future(started: Gate, ended: Box, box: Box) -> None:
    try:
        rpc.rpc_sync("w2", never, args=(started,), timeout=LONG)
    except BaseException as error:
        ended.put("w2")
        box.put(error)


def of_value(started: Gate, rref: rpc.RRef[int], box: Box) -> None:
    started.announce()
    try:
        rref.local_value()
    except BaseException as error:
        box.put(error)


def cancel_and_see(future: rpc.Future[Any]) -> None:
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    assert not future.cancel()
    with pytest.raises(rpc.Cancelled, match="cancelled"):
        future.wait()


def test_running_function_sees_that_its_call_was_cancelled(pair: list[Agent]) -> None:
    started, ended = Gate(), Box()
    future = rpc.rpc_async("w1", until_cancelled, args=(started, ended), timeout=LONG)
    started.wait_for_arrivals()
    cancel_and_see(future)
    assert ended.wait_for() == ["w1"]
    assert not rpc.cancelled()
    assert not rpc.rpc_sync("w1", rpc.cancelled)


@pytest.mark.parametrize("by", ["linked", "connect"])  # the caller sends, or the thread of a box
def test_call_that_is_cancelled_while_it_is_being_sent(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    started, ended, agent = Gate(), Box(), pair[0]
    rpc.rpc_sync("w1", operator.add, args=(1, 2))

    class Sending:
        """A link that sends one frame. Before it says so, the user cancels the call."""

        def send(self, frame: Frame, deadline: float) -> None:
            monkeypatch.undo()
            link.send(frame, deadline)
            started.wait_for_arrivals()
            (call,) = agent.completion.open_calls()
            assert call.future is not None
            call.future.cancel()

    link: Link = agent.links.connect(agent.directory.resolve("w1"), math.inf)
    monkeypatch.setattr(agent.links, "linked", lambda _: None)
    monkeypatch.setattr(agent.links, by, lambda *_: Sending())
    future = rpc.rpc_async("w1", until_cancelled, args=(started, ended), timeout=LONG)
    with pytest.raises(rpc.Cancelled):
        future.wait()
    assert ended.wait_for() == ["w1"]


def test_future_that_is_done_can_not_be_cancelled(pair: list[Agent]) -> None:
    future = rpc.rpc_async("w1", operator.add, args=(1, 2))
    assert future.wait() == 3
    assert not future.cancel()
    assert not future.cancelled()
    assert future.wait() == 3


@pytest.mark.parametrize("nest", [by_sync, by_async, by_future, by_sync_of_future])
def test_calls_that_a_cancelled_function_made_are_cancelled(
    trio: list[Agent], nest: Callable[..., Any]
) -> None:
    started, ended, box = Gate(), Box(), Box()
    future = rpc.rpc_async("w1", nest, args=(started, ended, box), timeout=LONG)
    started.wait_for_arrivals()
    cancel_and_see(future)
    assert ended.wait_for() == ["w2"]
    (error,) = box.wait_for()
    assert isinstance(error, rpc.Cancelled)


def test_wait_for_a_value_ends_when_the_call_is_cancelled(pair: list[Agent], gate: Gate) -> None:
    started, box = Gate(), Box()
    rref = rpc.remote("w1", wait_at, args=(gate,))
    future = rpc.rpc_async("w1", of_value, args=(started, rref, box), timeout=LONG)
    started.wait_for_arrivals()
    cancel_and_see(future)
    (error,) = box.wait_for()
    assert isinstance(error, rpc.Cancelled)


def test_queued_call_is_dropped(start: Callable[..., list[Agent]]) -> None:
    gate, box = Gate(), Box()
    _, w1 = start(2, num_worker_threads=1)
    running = rpc.rpc_async("w1", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    queued = [rpc.rpc_async("w1", box.put, args=(n,)) for n in range(3)]
    cancel_and_see(queued[1])
    served = w1.directory.resolve("w0").incoming
    heard = threading.Event()
    while not any(job.cancelled for job in list(served._running.values())):  # type: ignore[attr-defined]
        assert not heard.wait(0.005)
    gate.open()
    running.wait()
    queued[2].wait()
    assert sorted(box.things) == [0, 2]


def test_call_that_waits_for_its_turn_is_dropped(pair: list[Agent], gate: Gate) -> None:
    worker = rpc.remote("w1", Worker, concurrency=1)
    running = worker.rpc_async().wait(gate)
    gate.wait_for_arrivals()
    queued = [worker.rpc_async().add() for _ in range(3)]
    cancel_and_see(queued[0])
    cancel_and_see(queued[2])
    rpc.rpc_sync("w1", operator.add, args=(1, 2))  # behind what says so
    gate.open()
    running.wait()
    assert queued[1].wait() == 1
    assert worker.rpc_sync().add() == 2


def test_asyncio_task_that_is_cancelled_cancels_the_call(pair: list[Agent]) -> None:
    started, ended = Gate(), Box()

    async def main() -> None:
        async def one() -> None:
            await rpc.rpc_async("w1", until_cancelled, args=(started, ended), timeout=LONG)

        task = asyncio.ensure_future(one())
        await asyncio.get_running_loop().run_in_executor(None, started.wait_for_arrivals)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended.wait_for() == ["w1"]


def test_timeout_of_asyncio_cancels_the_call(pair: list[Agent]) -> None:
    started, ended = Gate(), Box()

    async def main() -> None:
        future = rpc.rpc_async("w1", until_cancelled, args=(started, ended), timeout=LONG)
        await asyncio.get_running_loop().run_in_executor(None, started.wait_for_arrivals)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.05)

    asyncio.run(main())
    assert ended.wait_for() == ["w1"]


def test_future_of_then_and_of_the_user_can_be_cancelled(pair: list[Agent], gate: Gate) -> None:
    call = rpc.rpc_async("w1", wait_at, args=(gate, 5))
    after = call.then(lambda future: future.wait() + 1)
    own: rpc.Future[int] = rpc.Future()
    cancel_and_see(after)
    cancel_and_see(own)
    gate.open()
    assert call.wait() == 5


def test_function_whose_caller_has_no_time_left_sees_it(pair: list[Agent]) -> None:
    started, ended = Gate(), Box()

    def attempt(seconds: float) -> None:
        with pytest.raises(rpc.RpcTimeout):
            rpc.rpc_sync("w1", until_cancelled, args=(started, ended), timeout=seconds)

    until_begun(started, attempt, 0.9)
    assert ended.wait_for()[0] == "w1"


def later_call(make: Callable[[Any], rpc.Future[int]]) -> tuple[rpc.Future[Any], Callable[[], Any]]:
    """Return the future of a call of an object that is yet to be made, and what makes that."""
    object_made: rpc.Future[int] = rpc.Future()
    return _FollowingCall.of(object_made, make), lambda: object_made.set_result(1)


def repeated_call(
    make: Callable[[Any], rpc.Future[int]],
) -> tuple[rpc.Future[Any], Callable[[], Any]]:
    """Return the future of a call that may be repeated, and what makes the first attempt."""
    future = RepeatedCall()
    future.attempts, future.make = Attempted(), make  # type: ignore[assignment]
    return future, future.begin


class Attempted:
    """Attempts that are not repeated."""

    def left(self) -> float:
        return 0.0

    def pause(self, _: BaseException) -> None:
        return None

    def told(self, error: BaseException) -> BaseException:
        return error


@pytest.mark.parametrize("kind", [later_call, repeated_call])
def test_call_that_is_cancelled_before_it_is_made_is_not_made(kind: Callable[..., Any]) -> None:
    made: list[object] = []
    future, make = kind(made.append)
    cancel_and_see(future)
    make()
    assert made == []


@pytest.mark.parametrize("kind", [later_call, repeated_call])
def test_call_that_is_cancelled_while_it_is_made_ends(kind: Callable[..., Any]) -> None:
    call: rpc.Future[int] = rpc.Future()

    def cancel_meanwhile(_: object) -> rpc.Future[int]:
        assert future.cancel()
        return call

    future, make = kind(cancel_meanwhile)
    make()
    assert call.cancelled()
    assert future.cancelled()
