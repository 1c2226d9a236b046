"""Leaving: gracefully, bounded, past the dead, and without leaving anything behind."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import patient_cluster
from descriptors import check_no_descriptors_left
from threads_left import check_no_threads_left

from behaviour.helpers import PATIENCE, Box, Gate, echo, in_threads, wait_at
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.runtime.current import set_default_agent
from farcall.testing.cluster import Transport, acting_as


def shut_down(agent: Agent, timeout: float = 0.0) -> Callable[[], None]:
    return functools.partial(agent.shutdown, True, timeout)


def call_back(gate: Gate, to: str) -> str:
    gate.wait()
    return rpc.rpc_sync(to, echo, args=("called back",))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_group_leaves_together(start: Callable[..., list[Agent]], size: int) -> None:
    agents = start(size)
    rpc.rpc_sync(size - 1, echo, args=(1,))
    with in_threads(*map(shut_down, agents)) as results:
        pass
    assert results == [None] * size
    assert all(agent.status.is_closed for agent in agents)


def test_no_worker_leaves_before_all_want_to(trio: list[Agent]) -> None:
    left = Box()

    def leave(agent: Agent) -> None:
        agent.shutdown()
        left.put(agent.me.name)

    with in_threads(functools.partial(leave, trio[1]), functools.partial(leave, trio[2])):
        # Those that want to leave still serve, and serve each other.
        for number in range(50):
            assert rpc.rpc_sync(1 + number % 2, echo, args=(number,)) == number
        assert left.things == []
        trio[0].shutdown()
    assert sorted(left.things) == ["w1", "w2"]


def test_calls_in_flight_are_waited_for(trio: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))
    mutual = rpc.rpc_async("w2", call_back, args=(gate, "w0"))
    rref = rpc.remote("w1", wait_at, args=(gate, 6))
    gate.wait_for_arrivals(3)
    with in_threads(*map(shut_down, trio)) as results:
        assert not future.done()
        assert not any(agent.status.is_closed for agent in trio)
        gate.open()
    assert results == [None] * 3
    assert future.value() == 5
    assert mutual.value() == "called back"
    del rref


def test_calls_that_callbacks_make_are_waited_for(pair: list[Agent], gate: Gate) -> None:
    def again(future: torch.futures.Future[Any]) -> Any:
        return rpc.rpc_sync("w1", echo, args=(future.wait() + 1,))

    future = rpc.rpc_async("w1", wait_at, args=(gate, 0)).then(again)
    for _ in range(5):
        future = future.then(again)
    with in_threads(*map(shut_down, pair)) as results:
        gate.open()
    assert results == [None, None]
    assert future.wait() == 6


def test_the_dead_are_not_waited_for(trio: list[Agent]) -> None:
    rpc.rpc_sync("w2", echo, args=(1,))
    trio[2].close()
    with in_threads(*map(shut_down, trio[:2])) as results:
        pass
    assert results == [None, None]


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_worker_that_dies_meanwhile_is_not_waited_for(trio: list[Agent], dead: int) -> None:
    alive = [agent for agent in trio if agent is not trio[dead]]
    with in_threads(*map(shut_down, alive)) as results:
        trio[dead].close()
    assert results == [None, None]


def test_a_shutdown_that_takes_too_long_names_the_missing_workers(trio: list[Agent]) -> None:
    with pytest.raises(rpc.RpcTimeout) as raised:
        trio[0].shutdown(timeout=0.1)
    assert "'w1', 'w2'" in str(raised.value)
    assert trio[0].status.is_closed


def test_a_shutdown_that_waits_for_its_own_calls_says_so(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    with pytest.raises(rpc.RpcTimeout, match="in flight"):
        pair[0].shutdown(timeout=0.1)
    with pytest.raises(rpc.Cancelled):
        future.wait()


def test_an_ungraceful_shutdown_waits_for_no_worker(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    pair[0].shutdown(graceful=False)
    with pytest.raises(rpc.Cancelled):
        future.wait()


def test_shutting_down_twice_is_harmless(pair: list[Agent]) -> None:
    for _ in range(2):
        for agent in pair:
            agent.shutdown(graceful=False)
            agent.close()
            assert agent.status.is_closed


def test_the_rpc_module_shuts_its_default_agent_down(transport: Transport) -> None:
    for _ in range(3):
        with patient_cluster(2, transport=transport) as agents:
            set_default_agent(agents[0])
            try:
                assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
                with in_threads(shut_down(agents[1]), rpc.shutdown) as results:
                    pass
                assert results == [None, None]
                with pytest.raises(rpc.NotInitialized):
                    rpc.rpc_sync("w1", echo, args=(1,))
            finally:
                set_default_agent(None)


@pytest.mark.parametrize("concurrency", [None, 1])
def test_an_agent_that_closes_while_it_takes_its_own_remote_call_logs_no_error(
    pair: list[Agent],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    concurrency: int | None,
) -> None:
    references = pair[0].references
    admit, admitted = references.admit, threading.Event()

    def admit_at_the_end(*request: Any) -> bool:
        references.close(pair[0].status.closed_error())  # as `Agent.close` does, in its thread
        try:
            return admit(*request)
        finally:
            admitted.set()

    monkeypatch.setattr(references, "admit", admit_at_the_end)
    rref = rpc.remote("w0", echo, args=(1,), concurrency=concurrency)
    assert admitted.wait(PATIENCE)
    pair[0].close()
    with pytest.raises((rpc.Cancelled, rpc.NotInitialized)):
        rref.to_here()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_handler_may_shut_its_worker_down(pair: list[Agent]) -> None:
    with pytest.raises((rpc.PeerLost, rpc.Cancelled)):
        rpc.rpc_sync("w1", rpc.shutdown, kwargs={"graceful": False})
    pair[1].close()
    assert pair[1].status.is_closed


def test_groups_come_and_go_without_leaving_anything(transport: Transport) -> None:
    def use() -> None:
        with patient_cluster(3, transport=transport) as agents:
            with acting_as(agents[0]):
                rrefs = [rpc.remote(to, echo, args=(to,)) for to in range(3)]
                assert [rref.to_here() for rref in rrefs] == [0, 1, 2]
                assert rpc.rpc_sync("w1", rpc.rpc_sync, args=("w2", echo, (5,))) == 5
                futures = [rpc.rpc_async(i % 3, echo, args=(i,)) for i in range(30)]
                assert torch.futures.wait_all(futures) == list(range(30))
            with in_threads(*map(shut_down, agents)) as results:
                pass
            assert results == [None] * 3

    use()
    with check_no_descriptors_left(), check_no_threads_left():
        for _ in range(10):
            use()


def test_closing_at_once_leaves_nothing(transport: Transport) -> None:
    gate = Gate()
    with check_no_descriptors_left(), check_no_threads_left():
        for _ in range(5):
            with patient_cluster(2, transport=transport) as agents, acting_as(agents[0]):
                futures = [rpc.rpc_async("w1", echo, args=(i,)) for i in range(50)]
                sync = rpc.rpc_async("w0", wait_at, args=(gate,))
                gate.wait_for_arrivals()
                gate.open()
            for future in (*futures, sync):
                assert future.done()
                with contextlib.suppress(rpc.Cancelled, rpc.PeerLost):
                    future.wait()


def test_calls_that_race_with_the_end_all_end(transport: Transport) -> None:
    for _ in range(5):
        with patient_cluster(2, transport=transport) as agents:
            started = threading.Barrier(5)

            def call(agent: Agent, to: str, started: threading.Barrier = started) -> str:
                with acting_as(agent):
                    started.wait(PATIENCE)
                    try:
                        while True:
                            rpc.rpc_sync(to, echo, args=(1,))
                            rpc.rpc_async(to, echo, args=(1,)).wait()
                            rpc.remote(to, echo, args=(1,)).to_here()
                    except (rpc.Cancelled, rpc.PeerLost, rpc.NotInitialized) as error:
                        return type(error).__name__

            calls = [functools.partial(call, agents[i % 2], f"w{i // 2}") for i in range(4)]
            with in_threads(*calls) as results:
                started.wait(PATIENCE)
                agents[1].close()
                agents[0].close()
            assert all(isinstance(result, str) for result in results), results
