"""One caller's requests that can't run yet take a bounded part of the callee's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from patience import PATIENCE

from behaviour.helpers import Gate, echo, wait_until
from farcall import rpc
from farcall.protocol.admission import Admission, Bounds
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as
from farcall.transport.base import NotSent
from farcall.transport.process_group.link import GroupLink

SIZE = 100_000  # bytes of each request
COUNT = 100
FIRST = 16  # more than are queued and run
BOUND = 10 * SIZE
# Bytes that a transport has received before it is told to stop.
SLACK = 1 << 20
FOREVER = {"timeout": 0}


@pytest.fixture
def flooded(start: Callable[..., list[Agent]], gate: Gate) -> list[Agent]:
    """Return three workers: w1 has more requests of w0 than it takes, until the gate opens."""
    agents = start(3, num_worker_threads=2, bounds=Bounds(queued_bytes=BOUND))
    for number in range(COUNT):
        if number == FIRST:
            wait_until(lambda: not admission(agents[1]).reads)
            wait_until(lambda: is_held_up(agents[0]))
        rpc.rpc_async("w1", pass_by, args=(gate, b"x" * SIZE), **FOREVER)
    return agents


def is_held_up(agent: Agent) -> bool:
    """Return whether the agent's link to w1 is shut, where a message has to arrive for that."""
    links = [link for link in agent.endpoint.links() if isinstance(link, GroupLink)]
    try:
        for link in links:
            if link.peer.name == "w1":
                link.gate.pass_by(time.monotonic())
    except NotSent:
        return True
    return not links


def pass_by(gate: Gate, _: bytes) -> int:
    return gate.wait()


def admission(agent: Agent, of: int = 0) -> Admission[object]:
    """Return the agent's record of calls that it has queued of w0."""
    peer = next(peer for peer in agent.directory.all() if peer.worker.id == of)
    return peer.admission


def test_requests_beyond_the_bound_stay_with_the_caller(flooded: list[Agent], gate: Gate) -> None:
    callee = flooded[1]
    with acting_as(flooded[2]):  # what w1 had received before is handled by then
        for _ in range(10):
            assert rpc.rpc_sync("w1", echo, args=(7,), **FOREVER) == 7
    assert admission(callee).queued_bytes > BOUND
    assert admission(callee).queued_bytes < BOUND + SLACK
    assert gate.arrived <= 3  # two places, and a guest's
    gate.open()
    gate.wait_for_passed(COUNT)
    wait_until(lambda: not admission(callee).queued)
    assert not admission(callee).queued_bytes
    assert admission(callee).reads
    assert rpc.rpc_sync("w1", echo, args=(8,), **FOREVER) == 8


def test_a_worker_that_does_not_read_a_caller_hears_its_answers(flooded: list[Agent]) -> None:
    with acting_as(flooded[1]):
        for number in range(20):
            assert rpc.rpc_sync("w0", echo, args=(number,), **FOREVER) == number
    assert not admission(flooded[1]).reads


def test_the_end_of_a_caller_that_is_not_read_is_noticed(flooded: list[Agent], gate: Gate) -> None:
    caller = next(peer for peer in flooded[1].directory.all() if peer.worker.id == 0)
    flooded[0].close()
    if flooded[1].endpoint.addresses[0].startswith("tcp"):
        gate.open()  # else the last bytes of the caller may wait in its kernel
    wait_until(lambda: caller.loss_cause is not None)
    assert caller.admission.reads
    gate.open()
    wait_until(lambda: not caller.admission.queued)


def go_on(depth: int, name: str) -> int:
    if not depth:
        return 0
    other = "w1" if name == "w0" else "w0"
    return 1 + int(rpc.rpc_sync(other, go_on, args=(depth - 1, other), **FOREVER))


def test_nested_calls_that_have_all_threads_hear_of_each_other(
    start: Callable[..., list[Agent]],
) -> None:
    """Call without timeouts: requests that wait unread behind others would never be answered."""
    start(2, num_worker_threads=4, max_threads=8, bounds=Bounds(queued_requests=2))
    futures = [rpc.rpc_async("w1", go_on, args=(3, "w1"), **FOREVER) for _ in range(60)]
    for future in futures:
        assert future.wait() == 3


@pytest.fixture
def bounded(start: Callable[..., list[Agent]]) -> Agent:
    return start(2, num_worker_threads=1, bounds=Bounds(queued_requests=3))[0]


def test_calls_to_oneself_are_bounded_too(bounded: Agent, gate: Gate) -> None:
    itself = bounded.directory.resolve("w0")
    queued = []
    for number in (20, 40):
        for _ in range(20):
            rpc.rpc_async("w0", pass_by, args=(gate, b""), **FOREVER)
        # One runs, and one may be in the hands of the thread that sends.
        wait_until(lambda number=number: itself.admission.queued + len(itself.outbox) >= number - 2)
        assert not itself.admission.reads
        queued.append(itself.admission.queued)
    assert queued[1] <= queued[0] + 1  # that one
    gate.open()
    gate.wait_for_passed(40)
    assert rpc.rpc_sync("w0", echo, args=(7,), **FOREVER) == 7


def test_requests_whose_time_is_over_make_room(bounded: Agent, gate: Gate) -> None:
    del bounded
    first = rpc.rpc_async("w1", pass_by, args=(gate, b""), **FOREVER)
    gate.wait_for_arrivals()
    late = [rpc.rpc_async("w1", echo, args=(1,), timeout=0.05) for _ in range(50)]
    for future in late:
        with pytest.raises(rpc.RpcTimeout):
            future.wait()
    gate.open()
    assert first.wait() == 0
    assert rpc.rpc_sync("w1", echo, args=(2,), **FOREVER) == 2


def test_graceful_shutdown_goes_through_a_flood(flooded: list[Agent], gate: Gate) -> None:
    leaving = [threading.Thread(target=agent.shutdown) for agent in flooded]
    for thread in leaving:
        thread.start()
    gate.wait_for_arrivals(2)
    gate.open()
    for thread in leaving:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert gate.passed == COUNT
