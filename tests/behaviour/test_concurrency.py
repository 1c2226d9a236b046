"""`remote(concurrency=)`: how many calls of an object's methods run at once, and in which order."""

from __future__ import annotations

import operator
import re
import threading
import time
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE, Box, Gate
from farcall import rpc
from farcall.runtime.agent import Agent


class Counter:
    """A counter without a lock, whose increment another thread may come in between."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        count = self.count
        time.sleep(0.0005)
        self.count = count + 1

    def value(self) -> int:
        return self.count


class Worker:
    """An object whose methods the test can stop."""

    def __init__(self, gate: Gate | None = None) -> None:
        if gate is not None:
            gate.wait()
        self.seen: list[int] = []

    def wait(self, gate: Gate) -> int:
        return gate.wait()

    def note(self, number: int, *_: Any) -> list[int]:
        self.seen.append(number)
        return self.seen

    @rpc.functions.async_execution
    def later(self, future: _Kept) -> torch.futures.Future[int]:
        return future.get()

    def through(self, me: rpc.RRef[Worker], workers: tuple[str, ...]) -> list[int]:
        """Call another method of the same object, through other workers."""
        return ring(me, workers)

    def meet(self, other: rpc.RRef[Worker], gate: Gate) -> list[int]:
        gate.wait()
        return other.rpc_sync(timeout=0.3).note(1)  # type: ignore[no-any-return]

    def start(self, me: rpc.RRef[Worker], gate: Gate, box: Box) -> None:
        rpc.rpc_async("w0", wait_and_note, args=(me, gate, box))


class _Kept:
    """The future of a test, which is in the same process."""

    futures: dict[int, torch.futures.Future[int]] = {}

    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> torch.futures.Future[int]:
        return self.futures.setdefault(self.number, torch.futures.Future())


def ring(me: rpc.RRef[Worker], workers: tuple[str, ...]) -> list[int]:
    if not workers:
        return me.rpc_sync().note(1)
    return rpc.rpc_sync(workers[0], ring, args=(me, workers[1:]))


def wait_and_note(me: rpc.RRef[Worker], gate: Gate, box: Box) -> None:
    gate.wait()
    box.put(me.rpc_sync().note(7))


def test_counter_without_a_lock_counts_every_call_of_several_workers(trio: list[Agent]) -> None:
    counter = rpc.remote("w1", Counter, concurrency=1)
    futures = [counter.rpc_async().add() for _ in range(100)]
    futures.append(rpc.rpc_async("w2", add_often, args=(counter, 100)))
    torch.futures.wait_all(futures)
    assert counter.rpc_sync().value() == 200


def add_often(counter: rpc.RRef[Counter], times: int) -> None:
    torch.futures.wait_all([counter.rpc_async().add() for _ in range(times)])


def test_calls_of_one_caller_run_in_the_order_in_which_they_arrive(pair: list[Agent]) -> None:
    worker = rpc.remote("w1", Worker, concurrency=1)
    # Every third has a reference of another owner, which has to be registered first.
    more = [rpc.RRef(number) if number % 3 == 0 else None for number in range(60)]
    futures = [worker.rpc_async().note(number, more[number]) for number in range(60)]
    torch.futures.wait_all(futures)
    assert worker.to_here().seen == list(range(60))


def test_so_many_calls_run_at_once_and_no_more(pair: list[Agent], gate: Gate) -> None:
    worker = rpc.remote("w1", Worker, concurrency=2)
    futures = [worker.rpc_async().wait(gate) for _ in range(6)]
    gate.wait_for_arrivals(2)
    assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
    assert gate.arrived == 2
    gate.open()
    torch.futures.wait_all(futures)
    assert gate.most_inside == 2


def test_calls_that_wait_hold_no_thread(start: Any, gate: Gate) -> None:
    start(2, num_worker_threads=2, max_threads=8)
    worker = rpc.remote("w1", Worker, args=(gate,), concurrency=1)  # not even made yet
    futures = [worker.rpc_async().note(number) for number in range(50)]
    assert rpc.rpc_sync("w1", operator.add, args=(1, 2), timeout=PATIENCE) == 3
    gate.open()
    assert futures[-1].wait() == list(range(50))


def test_call_counts_until_its_future_is_done(pair: list[Agent], request: Any) -> None:
    kept = _Kept(hash(request.node.name))
    worker = rpc.remote("w1", Worker, concurrency=1)
    first = worker.rpc_async().later(kept)
    second = worker.rpc_async().note(2)
    assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3  # what came before has begun
    assert not second.done()
    kept.get().set_result(4)
    assert first.wait() == 4
    assert second.wait() == [2]


@pytest.mark.parametrize("workers", [(), ("w1",), ("w0",), ("w2", "w0"), ("w2", "w1", "w0")])
def test_object_that_calls_itself_round_a_ring_is_served_at_once(
    trio: list[Agent], workers: tuple[str, ...]
) -> None:
    worker = rpc.remote("w1", Worker, concurrency=1)
    assert worker.rpc_sync(PATIENCE).through(worker, workers) == [1]


def test_two_objects_that_call_each_other_at_once_do_not_hang(
    pair: list[Agent], gate: Gate
) -> None:
    first, second = (rpc.remote(to, Worker, concurrency=1) for to in ("w0", "w1"))
    calls = [
        first.rpc_async(PATIENCE).meet(second, gate),
        second.rpc_async(PATIENCE).meet(first, gate),
    ]
    gate.wait_for_arrivals(2)
    gate.open()
    texts = []
    for call in calls:
        try:
            call.wait()
        except rpc.RpcTimeout as error:
            texts.append(str(error))
    # The end of one frees its object. The other's call can still arrive in time, or run too late.
    assert texts
    # The name of a method is among the arguments, which a call that comes too late never loads.
    named = re.compile(r"\bnote\b|a method of a remote value was not run")
    assert [text for text in texts if not named.search(text)] == []
    assert first.rpc_sync().note(2)[-1] == 2


def test_call_that_comes_from_one_that_has_ended_waits_as_others_do(pair: list[Agent]) -> None:
    first, box, busy = Gate(), Box(), Gate()
    worker = rpc.remote("w1", Worker, concurrency=1)
    worker.rpc_sync().start(worker, first, box)
    waiting = worker.rpc_async().wait(busy)
    busy.wait_for_arrivals()
    first.open()
    first.wait_for_passed()
    assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
    assert not box.things
    busy.open()
    waiting.wait()
    assert box.wait_for() == [[7]]


def test_call_that_raises_or_is_given_up_lets_the_next_one_run(
    pair: list[Agent], gate: Gate
) -> None:
    worker = rpc.remote("w1", Worker, concurrency=1)
    with pytest.raises(TypeError):
        worker.rpc_sync().note()
    running = worker.rpc_async().wait(gate)
    gate.wait_for_arrivals()
    with pytest.raises(rpc.RpcTimeout):
        worker.rpc_sync(timeout=0.05).note(1)
    rpc.rpc_sync("w1", operator.add, args=(1, 2))  # behind what says that it was given up
    gate.open()
    running.wait()
    assert worker.rpc_sync().note(2) == [2]


def test_calls_of_a_lost_caller_are_dropped(trio: list[Agent], gate: Gate) -> None:
    worker = rpc.remote("w1", Worker, concurrency=1)
    running = worker.rpc_async().wait(gate)
    gate.wait_for_arrivals()
    rpc.rpc_async("w2", add_note, args=(worker,)).wait()
    lost = threading.Event()
    with trio[1].losses.subscribed(lambda _: lost.set()):
        trio[2].close()
        assert lost.wait(PATIENCE)
    gate.open()
    running.wait()
    assert worker.rpc_sync().note(2) == [2]


def add_note(worker: rpc.RRef[Worker]) -> None:
    worker.rpc_async().note(1)


def test_object_that_can_not_be_made_fails_the_calls_that_wait(pair: list[Agent]) -> None:
    worker = rpc.remote("w1", Worker, args=(1, 2, 3), concurrency=1)
    futures = [worker.rpc_async().note(number) for number in range(3)]
    for future in futures:
        with pytest.raises(TypeError):
            future.wait()


def test_methods_called_by_remote_and_on_the_owner_itself_take_turns(
    pair: list[Agent], gate: Gate
) -> None:
    worker = rpc.remote("w0", Worker, concurrency=1)
    running = worker.rpc_async().wait(gate)
    gate.wait_for_arrivals()
    made = worker.remote().note(3)
    assert rpc.rpc_sync("w0", operator.add, args=(1, 2)) == 3
    gate.open()
    running.wait()
    assert made.to_here() == [3]


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError)])
def test_wrong_concurrency_is_refused(pair: list[Agent], wrong: Any, error: type) -> None:
    with pytest.raises(error, match="concurrency"):
        rpc.remote("w1", Worker, concurrency=wrong)
