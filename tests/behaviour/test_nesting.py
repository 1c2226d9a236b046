"""Nested and mutual calls, and their order: no thread starvation, and the bound holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import (
    PATIENCE,
    PROXIES,
    WAYS,
    Gate,
    by_async,
    by_remote,
    by_sync,
    echo,
    in_threads,
    wait_at,
    worker_name,
)
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)


def ping_pong(depth: int, way: Way, path: list[str]) -> list[str]:
    """Calls the other worker, which calls this one, and so on."""
    here = rpc.get_worker_info()
    path = [*path, here.name]
    return way(1 - here.id, ping_pong, (depth - 1, way, path)) if depth else path


def around(steps: int, size: int) -> int:
    """Calls the next worker of a ring, which calls the next one, and so on."""
    following = (rpc.get_worker_info().id + 1) % size
    return rpc.rpc_sync(following, around, args=(steps - 1, size)) + 1 if steps else 0


def to_itself(depth: int, way: Way) -> int:
    return way(rpc.get_worker_info(), to_itself, (depth - 1, way)) + 1 if depth else 0


def fan_out(depth: int) -> int:
    """Calls the other worker twice at once, down a tree."""
    if not depth:
        return 1
    other = 1 - rpc.get_worker_info().id
    futures = [rpc.rpc_async(other, fan_out, args=(depth - 1,)) for _ in range(2)]
    return sum(future.wait() for future in futures)


class Player:
    def __init__(self) -> None:
        self.other: rpc.RRef[Player]

    def meet(self, other: rpc.RRef[Player]) -> None:
        self.other = other

    def play(self, depth: int, proxy: Way) -> int:
        return proxy(self.other, "play", depth - 1, proxy) + 1 if depth else 0


@each_way
@pytest.mark.parametrize("depth", [1, 10, 50])
def test_mutual_calls_need_one_thread_only(
    start: Callable[..., list[Agent]], call: Way, depth: int
) -> None:
    start(2, num_worker_threads=1)
    path = call("w1", ping_pong, (depth, call, []))
    assert path == [f"w{(n + 1) % 2}" for n in range(depth + 1)]


def test_mutual_calls_may_mix_all_ways(start: Callable[..., list[Agent]]) -> None:
    start(2, num_worker_threads=1)
    assert rpc.rpc_sync("w1", mixed, args=(12,)) == 12


def mixed(depth: int) -> int:
    way = (by_sync, by_async, by_remote)[depth % 3]
    return way(1 - rpc.get_worker_info().id, mixed, (depth - 1,)) + 1 if depth else 0


@each_way
def test_a_worker_may_call_itself_in_a_call(start: Callable[..., list[Agent]], call: Way) -> None:
    start(2, num_worker_threads=1)
    assert call("w0", to_itself, (10, call)) == 10
    assert call("w1", to_itself, (10, call)) == 10


@pytest.mark.parametrize("proxy", PROXIES)
def test_mutual_calls_through_references(start: Callable[..., list[Agent]], proxy: Way) -> None:
    start(2, num_worker_threads=1)
    here, there = rpc.RRef(Player()), rpc.remote("w1", Player)
    here.local_value().meet(there)
    there.rpc_sync().meet(here)
    assert proxy(there, "play", 10, proxy) == 10
    there.rpc_sync().meet(there)  # so that neither keeps the other forever
    here.local_value().meet(here)


def test_calls_around_a_ring(start: Callable[..., list[Agent]]) -> None:
    start(4, num_worker_threads=1)
    assert rpc.rpc_sync("w1", around, args=(20, 4)) == 20


def test_a_tree_of_calls(start: Callable[..., list[Agent]]) -> None:
    start(2, num_worker_threads=1)
    assert rpc.rpc_sync("w1", fan_out, args=(6,)) == 64


def test_everybody_calls_everybody_nested_at_once(start: Callable[..., list[Agent]]) -> None:
    agents = start(3, num_worker_threads=1)
    together = threading.Barrier(6)

    def call(agent: Agent) -> int:
        with acting_as(agent):
            together.wait(PATIENCE)
            return sum(rpc.rpc_sync(to, around, args=(6, 3)) for to in range(3))

    with in_threads(*(lambda agent=agent: call(agent) for agent in agents * 2)) as results:
        pass
    assert results == [18] * 6


def test_a_nested_call_acts_as_the_worker_that_serves(trio: list[Agent]) -> None:
    assert rpc.rpc_sync("w1", rpc.rpc_sync, args=("w2", worker_name)) == "w2"
    assert rpc.rpc_sync("w1", rpc.rpc_sync, args=("w0", worker_name)) == "w0"
    assert rpc.rpc_sync("w1", worker_name) == "w1"
    assert worker_name() == "w0"


# How many run at once.


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_functions_run_than_there_are_threads(
    start: Callable[..., list[Agent]], gate: Gate, threads: int
) -> None:
    start(2, num_worker_threads=threads)
    futures = [rpc.rpc_async("w1", wait_at, args=(gate, i)) for i in range(30)]
    gate.wait_for_arrivals(threads)
    gate.open()
    assert torch.futures.wait_all(futures) == list(range(30))
    assert gate.most_inside == threads
    assert gate.arrived == 30


def test_as_many_functions_run_at_once_as_there_are_threads(
    start: Callable[..., list[Agent]],
) -> None:
    start(2, num_worker_threads=8)
    gate = Gate()
    futures = [rpc.rpc_async("w1", wait_at, args=(gate, i)) for i in range(8)]
    gate.wait_for_arrivals(8)  # all eight are inside together
    assert gate.most_inside == 8
    gate.open()
    torch.futures.wait_all(futures)


def test_sync_callers_are_bounded_too(start: Callable[..., list[Agent]], gate: Gate) -> None:
    agents = start(2, num_worker_threads=2)

    def call() -> Any:
        with acting_as(agents[0]):
            return rpc.rpc_sync("w1", wait_at, args=(gate, 1))

    with in_threads(*[call] * 10) as results:
        gate.wait_for_arrivals(2)
        gate.open()
    assert results == [1] * 10
    assert gate.most_inside == 2


def call_through(to: str, gate: Gate) -> int:
    return int(rpc.rpc_sync(to, wait_at, args=(gate, 1)))


def wait_for_future(to: str, gate: Gate) -> int:
    return int(rpc.rpc_async(to, wait_at, args=(gate, 1)).wait())


def wait_for_reference(to: str, gate: Gate) -> int:
    return int(rpc.remote(to, wait_at, args=(gate, 1)).to_here())


def wait_for_own_reference(to: str, gate: Gate) -> int:
    return int(rpc.remote(rpc.get_worker_info(), call_through, args=(to, gate)).local_value())


@pytest.mark.parametrize(
    "wait", [call_through, wait_for_future, wait_for_reference, wait_for_own_reference]
)
def test_a_function_that_waits_for_farcall_leaves_its_thread_to_others(
    start: Callable[..., list[Agent]], gate: Gate, wait: Callable[..., int]
) -> None:
    start(3, num_worker_threads=1)
    inner = Gate()
    futures = [rpc.rpc_async("w1", wait, args=("w2", inner)) for _ in range(5)]
    inner.wait_for_arrivals(1)  # w2 has one thread, so one is inside and four are queued there
    assert rpc.rpc_sync("w1", echo, args=("free",)) == "free"
    inner.open()
    assert torch.futures.wait_all(futures) == [1] * 5
    assert inner.most_inside == 1


def test_a_slow_function_holds_up_no_call(start: Callable[..., list[Agent]], gate: Gate) -> None:
    start(2, num_worker_threads=2)
    slow = rpc.rpc_async("w1", wait_at, args=(gate, "slow"))
    gate.wait_for_arrivals()
    assert [rpc.rpc_sync("w1", echo, args=(i,)) for i in range(50)] == list(range(50))
    assert not slow.done()
    gate.open()
    assert slow.wait() == "slow"


def test_slow_functions_do_not_hold_up_answers_to_their_worker(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    agents = start(2, num_worker_threads=1)
    slow = rpc.rpc_async("w1", wait_at, args=(gate, "slow"))
    gate.wait_for_arrivals()
    with acting_as(agents[1]):  # all of w1's threads are taken, but it can still call
        assert rpc.rpc_sync("w0", echo, args=(1,)) == 1
        assert rpc.rpc_async("w0", echo, args=(2,)).wait() == 2
        assert rpc.remote("w0", echo, args=(3,)).to_here() == 3
    assert not slow.done()
    gate.open()
    assert slow.wait() == "slow"


def test_a_slow_callback_holds_up_no_call(pair: list[Agent], gate: Gate) -> None:
    start = Gate()
    future = rpc.rpc_async("w1", wait_at, args=(start,)).then(lambda _: gate.wait())
    start.open()
    gate.wait_for_arrivals()
    assert rpc.rpc_async("w1", echo, args=(2,)).wait() == 2
    gate.open()
    assert future.wait() == 0


def test_busy_functions_hold_up_no_call(start: Callable[..., list[Agent]]) -> None:
    start(2, num_worker_threads=2)
    stop = Gate()
    busy = rpc.rpc_async("w1", spin, args=(stop,))
    stop.wait_for_arrivals()
    assert [rpc.rpc_sync("w1", echo, args=(i,)) for i in range(10)] == list(range(10))
    assert not busy.done()
    stop.open()
    assert busy.wait()


def spin(gate: Gate) -> bool:
    """Computes, and never lets go of its thread by itself, until the gate opens."""
    gate.announce()
    while not gate.is_open:
        pass
    return True
