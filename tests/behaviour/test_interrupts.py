"""Ctrl-C at every point where Python looks at signals, in the thread that makes calls."""

from __future__ import annotations

import contextvars
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import patient_cluster
from interrupts import Interrupt, needs_its_bytecode
from patience import PATIENCE

from behaviour.helpers import Gate, echo, in_threads, wait_at, wait_until
from behaviour.unmet import Store
from farcall import autograd, rpc
from farcall.errors import Cancelled, PeerLost
from farcall.runtime.agent import Agent
from farcall.testing.cluster import Transport, acting_as

pytestmark = pytest.mark.timeout(600)


def by_sync(reference: Any) -> None:
    rpc.rpc_sync("w1", echo, args=(1,))


def by_async(reference: Any) -> None:
    rpc.rpc_async("w1", echo, args=(1,)).wait()


def by_remote(reference: Any) -> None:
    rpc.remote("w1", echo, args=(1,)).to_here()


def by_reference(reference: Any) -> None:
    rpc.rpc_sync("w1", echo, args=(reference,))


def by_backward(reference: Any) -> None:
    # An interrupt at the beginning of `__exit__` leaves the block open (decisions/0006-ctrl-c.md).
    contextvars.copy_context().run(backward)


def backward() -> None:
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context, [rpc.rpc_sync("w1", torch.add, args=(x, x)).sum()])


def check(agents: list[Agent], where: str) -> None:
    """Check from another thread, so that a lock of the interrupted one is noticed."""

    def work() -> None:
        with acting_as(agents[0]):
            assert rpc.rpc_sync("w1", echo, args=(2,), timeout=PATIENCE) == 2
            assert rpc.rpc_async("w1", echo, args=(3,), timeout=PATIENCE).wait() == 3
        with acting_as(agents[1]):
            assert rpc.rpc_sync("w0", echo, args=(2,), timeout=PATIENCE) == 2

    with in_threads(work) as results:
        pass
    assert results == [None], where
    for agent in agents:
        wait_until(lambda agent=agent: not agent.coordinator.active)


@needs_its_bytecode
@pytest.mark.parametrize("way", [by_sync, by_async, by_remote, by_reference, by_backward])
def test_everything_works_after_an_interrupt_at_any_point(
    pair: list[Agent], way: Callable[[Any], None], gate: Gate
) -> None:
    check(pair, "before")
    other = rpc.rpc_async("w1", wait_at, args=(gate, 5), timeout=0)
    gate.wait_for_arrivals()
    interrupts = 0
    gc.disable()
    try:
        for number in range(1, 10_000):
            reference = rpc.RRef(1)
            interrupt = Interrupt(number)
            interrupts += interrupt.run(lambda reference=reference: way(reference))
            if not interrupt.where:
                break
            wait_until(lambda: pair[0].coordinator.active <= 1)
    finally:
        gc.enable()
    assert interrupts > 20
    gate.open()
    assert other.wait() == 5
    check(pair, interrupt.where)


def remote_to_a_stranger() -> None:
    rpc.remote("w1", echo, args=(1,))


def async_to_a_stranger() -> None:
    rpc.rpc_async("w1", echo, args=(1,))


@needs_its_bytecode
@pytest.mark.parametrize("transport", ["inproc"])
@pytest.mark.parametrize("way", [remote_to_a_stranger, async_to_a_stranger])
def test_a_call_that_is_left_and_interrupted_leaves_nothing_behind(
    start: Callable[..., list[Agent]], way: Callable[[], None]
) -> None:
    store = Store()
    store.answers.set()
    agents = start(2, find=store.find)
    interrupts = 0
    for number in itertools.count(1):
        store.part(agents[0], agents[1].me)
        interrupt = Interrupt(number)
        interrupts += interrupt.run(way)
        wait_until(lambda: not agents[0].machine.inquiries.open)
        check(agents, interrupt.where)
        if not interrupt.where:
            break
    assert interrupts > 20
    for agent in agents:
        wait_until(lambda agent=agent: not any(agent.references.statistics().values()))
    assert not agents[0].references._sought


@needs_its_bytecode
@pytest.mark.parametrize("transport", ["inproc"])
def test_a_thread_that_is_interrupted_while_it_stands_back_does_not_stop_the_leader(
    pair: list[Agent],
) -> None:
    executor = pair[0].executor
    interrupts = 0
    for number in range(1, 1000):
        executor.batch.begin()
        interrupt = Interrupt(number)
        interrupts += interrupt.run(executor.yield_to_batch)
        with in_threads(executor.batch.end):
            pass
        if not interrupt.where:
            break
    assert interrupts
    check(pair, "standing back")


def declare_lost(agents: list[Agent]) -> None:
    peer = agents[0].directory.of_incarnation(agents[1].me.incarnation)
    assert peer is not None
    agents[0].losses.declare_lost(peer, "tried")


def close(agents: list[Agent]) -> None:
    agents[0].close()


@needs_its_bytecode
@pytest.mark.parametrize("end", [declare_lost, close])
def test_a_thread_that_is_interrupted_while_it_ends_calls_ends_all(
    transport: Transport, end: Callable[[list[Agent]], None]
) -> None:
    for number in itertools.count(1):
        gate = Gate()
        with patient_cluster(2, transport=transport) as agents, acting_as(agents[0]):
            waiting = rpc.rpc_async("w1", wait_at, args=(gate,), timeout=0)
            interrupt = Interrupt(number)
            interrupt.run(lambda agents=agents: end(agents))
            # It may have come too early; then others notice the end.
            with in_threads(lambda agents=agents: end(agents)) as results:
                pass
            assert results == [None]
            wait_until(waiting.done)
            assert isinstance(waiting.exception(), PeerLost | Cancelled)
            wait_until(lambda agents=agents: not agents[0].coordinator.active)
            gate.open()
        if not interrupt.where:
            break
    assert number > 10
