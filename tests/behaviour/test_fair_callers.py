"""A caller that sends more than is served does not hold up the others. QUEUE-3 and QUEUE-4."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from patience import PATIENCE

from behaviour.helpers import Gate, by_async, by_remote, by_sync, echo, wait_at, wait_until
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

ORDER: list[str] = []


def note(caller: str) -> None:
    ORDER.append(caller)


def call_back(to: str) -> int:
    """Make a nested call, which runs a callback of the callee's own."""
    future = rpc.rpc_async(to, echo, args=(1,)).then(lambda done: done.value() + 1)
    return int(future.wait())


@pytest.mark.parametrize("places", [2, 4, 16])
@pytest.mark.parametrize("way", [by_sync, by_async, by_remote])
def test_functions_that_take_all_places_hold_up_no_other_caller(
    start: Callable[..., list[Agent]], gate: Gate, way: Callable[..., int], places: int
) -> None:
    agents = start(3, num_worker_threads=places)
    flood = [rpc.rpc_async("w1", wait_at, args=(gate, n)) for n in range(4 * places)]
    gate.wait_for_arrivals(places)
    with acting_as(agents[2]):
        for _ in range(3):
            assert way("w1", echo, args=(7,), timeout=PATIENCE) == 7
        assert way("w1", call_back, args=("w2",), timeout=PATIENCE) == 2
    assert gate.arrived == places  # the flood has got no place more
    gate.open()
    assert [future.wait() for future in flood] == list(range(4 * places))


def test_own_work_goes_on_beside_a_flood(start: Callable[..., list[Agent]], gate: Gate) -> None:
    agents = start(3, num_worker_threads=2)
    flood = [rpc.rpc_async("w1", wait_at, args=(gate, n)) for n in range(8)]
    gate.wait_for_arrivals(2)
    with acting_as(agents[1]):
        assert call_back("w2") == 2
    gate.open()
    for future in flood:
        future.wait()


def test_there_are_only_so_many_guests(start: Callable[..., list[Agent]], gate: Gate) -> None:
    """Let one function more run beside four places, from whichever caller."""
    agents = start(4, num_worker_threads=4)
    flood = [rpc.rpc_async("w1", wait_at, args=(gate, n)) for n in range(8)]
    gate.wait_for_arrivals(4)
    for agent in agents[2:]:
        with acting_as(agent):
            flood += [rpc.rpc_async("w1", wait_at, args=(gate, n)) for n in range(2)]
    gate.wait_for_arrivals(5)
    wait_until(lambda: agents[1].executor._queue.size == 7)
    assert gate.most_inside == 5
    gate.open()
    for future in flood:
        future.wait()


def test_with_one_place_only_one_function_runs(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    """Programs rely on that: their functions need no lock then."""
    agents = start(3, num_worker_threads=1)
    futures = [rpc.rpc_async("w1", wait_at, args=(gate, 0))]
    gate.wait_for_arrivals()
    with acting_as(agents[2]):
        futures += [rpc.rpc_async("w1", wait_at, args=(gate, n)) for n in range(2)]
        wait_until(lambda: agents[1].executor._queue.size == 2)
    gate.open()
    for future in futures:
        future.wait()
    assert gate.most_inside == 1


def test_queued_callers_take_turns(start: Callable[..., list[Agent]], gate: Gate) -> None:
    ORDER.clear()
    agents = start(4, num_worker_threads=1)
    futures = [rpc.rpc_async("w1", wait_at, args=(gate,))]
    gate.wait_for_arrivals()
    for agent, count in zip((agents[0], agents[2], agents[3]), (20, 2, 1), strict=True):
        with acting_as(agent):
            futures += [rpc.rpc_async("w1", note, args=(agent.me.name,)) for _ in range(count)]
            queued = len(futures) - 1
            wait_until(lambda queued=queued: agents[1].executor._queue.size == queued)
    gate.open()
    for future in futures:
        future.wait()
    assert ORDER[:5] == ["w0", "w2", "w3", "w0", "w2"]
    assert ORDER[5:] == ["w0"] * 18


def test_a_caller_that_is_lost_leaves_its_turn(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    agents = start(3, num_worker_threads=1)
    rpc.rpc_async("w1", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    with acting_as(agents[2]):
        waiting = [rpc.rpc_async("w1", echo, args=(n,)) for n in range(4)]
        wait_until(lambda: agents[1].executor._queue.size == 4)
    agents[2].close()
    for future in waiting:
        with pytest.raises(rpc.Cancelled):
            future.wait()
    ended = threading.Event()
    rpc.rpc_async("w1", echo, args=(1,)).add_done_callback(lambda _: ended.set())
    gate.open()
    assert ended.wait(PATIENCE)
    wait_until(lambda: not agents[1].executor._queue.size)
