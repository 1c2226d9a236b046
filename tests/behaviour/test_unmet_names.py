"""Asynchronous calls to a name that is not known yet: no thread waits for the store."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from behaviour.helpers import PATIENCE, echo, in_threads, wait_until
from behaviour.unmet import Store
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import PeerLost, RpcTimeout, UnknownWorker
from farcall.protocol.admission import Bounds
from farcall.runtime.agent import Agent
from farcall.runtime.current import current_agent
from farcall.runtime.membership.peers import PendingCall


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def agents(start: Callable[..., list[Agent]], store: Store) -> list[Agent]:
    """Return two agents, of which the first does not know the second."""
    agents = start(2, find=store.find)
    store.part(agents[0], agents[1].me)
    return agents


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1), np.str_("w1"), np.int64(1)])
def test_calls_go_out_in_order_when_the_store_has_answered(store: Store, to: Any) -> None:
    tensor, numbers = torch.ones(20_000), [1]
    futures = [rpc.rpc_async(to, echo, args=(tensor,)), rpc.rpc_async(to, echo, args=(numbers,))]
    tensor.zero_()  # the call has the earlier values
    numbers.append(2)
    assert not any(future.done() for future in futures)
    store.answers.set()
    assert torch.equal(futures[0].wait(), torch.ones(20_000))
    assert futures[1].wait() == [1]


def test_each_call_ends_at_its_own_deadline(agents: list[Agent], store: Store) -> None:
    patient = rpc.rpc_async("w1", echo, args=(1,), timeout=0)
    hasty = rpc.rpc_async("w1", echo, args=(2,), timeout=0.2)
    with pytest.raises(RpcTimeout, match=r"set timeout \(200 ms\): .* not answered in time"):
        hasty.wait()
    assert not patient.done()
    store.answers.set()
    assert patient.wait() == 1
    wait_until(lambda: "w1" not in agents[0].machine.inquiries.open)


def seconds_left() -> float:
    return current_agent().limits.of_call(0)[1]


def by_sync(timeout: float) -> float:
    return rpc.rpc_sync("w1", seconds_left, timeout=timeout)


def by_async(timeout: float) -> float:
    return rpc.rpc_async("w1", seconds_left, timeout=timeout).wait()


def by_async_at_once(timeout: float) -> float:
    """Pass arguments that can't be kept, so that the calling thread looks for the callee."""
    return rpc.rpc_async("w1", drop, args=(Unkeepable(),), timeout=timeout).wait()


def by_remote(timeout: float) -> float:
    rpc.remote("w1", seconds_left, timeout=timeout).to_here()
    return 0.0


def by_remote_at_once(timeout: float) -> float:
    rpc.remote("w1", drop, args=(Unkeepable(),), timeout=timeout).to_here()
    return 0.0


class Unkeepable:
    """It can be sent, and is made where w1 is only."""

    def __reduce__(self) -> tuple[Any, ...]:
        return made_by_w1, ()


def made_by_w1() -> int:
    if current_agent().me.name != "w1":
        raise RuntimeError("not here")
    return 1


def drop(_: Any) -> float:
    return seconds_left()


@pytest.mark.parametrize(
    "call", [by_sync, by_async, by_async_at_once, by_remote, by_remote_at_once]
)
def test_the_wait_for_the_store_counts_in_the_time_of_the_call(
    agents: list[Agent], store: Store, call: Callable[[float], float]
) -> None:
    begun: list[tuple[PendingCall, float]] = []
    begin = agents[0].coordinator.begin

    def note(call: Any) -> None:
        if isinstance(call, PendingCall):
            begun.append((call, time.monotonic()))
        begin(call)

    agents[0].coordinator.begin = note  # type: ignore[method-assign]
    delay, timeout = 0.3, 2 * PATIENCE

    def answer() -> None:
        assert store.asked.wait(PATIENCE)  # the call has begun
        time.sleep(delay)
        store.answers.set()

    with in_threads(answer):
        assert call(timeout) < timeout - 0.9 * delay
    pending, now = begun[0]
    assert pending.timeout == timeout
    assert pending.deadline - now < timeout - 0.9 * delay


@pytest.mark.usefixtures("agents")
def test_a_name_that_no_worker_has(store: Store) -> None:
    store.answers.set()
    with pytest.raises(UnknownWorker, match="'nobody'"):
        rpc.rpc_async("nobody", echo, args=(1,)).wait()


@pytest.mark.usefixtures("agents")
def test_a_store_that_is_gone(store: Store) -> None:
    store.is_gone = True
    with pytest.raises(UnknownWorker, match="could not be asked: no process hosts it"):
        rpc.rpc_async("w1", echo, args=(1,)).wait()


@pytest.mark.usefixtures("agents", "store")
@pytest.mark.parametrize("wrong", [1.5, None, True])
def test_a_value_that_is_no_name_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(UnknownWorker):
        rpc.rpc_async(wrong, echo, args=(1,))


@pytest.mark.usefixtures("agents")
def test_arguments_that_can_not_be_sent_are_refused_at_once(store: Store) -> None:
    store.answers.set()
    with pytest.raises(TypeError, match=r"argument 0 \(generator\)"):
        rpc.rpc_async("w1", echo, args=((n for n in range(3)),))


def test_references_in_the_arguments_are_kept(agents: list[Agent], store: Store) -> None:
    future = rpc.rpc_async("w1", fetch, args=(rpc.RRef(5),))
    store.answers.set()
    assert future.wait() == 5
    wait_until(lambda: not any(agents[0].references.statistics().values()))


def fetch(reference: Any) -> Any:
    return reference.to_here()


@pytest.mark.parametrize("kind", [rpc.rpc_async, rpc.remote])
def test_waiting_calls_are_bounded(
    start: Callable[..., list[Agent]], store: Store, kind: Any
) -> None:
    agents = start(2, find=store.find, bounds=Bounds(in_flight_bytes=100_000))
    store.part(agents[0], agents[1].me)
    tensor = torch.ones(20_000)
    first = kind("w1", echo, args=(tensor,), timeout=0)
    full = kind("w1", echo, args=(tensor,), timeout=0.1)
    with pytest.raises(
        RpcTimeout, match="where 'w1' is, and the option max_in_flight_bytes is 100000"
    ):
        full.to_here() if isinstance(full, rpc.RRef) else full.wait()

    patient = partial(copy_context().run, kind, "w1", echo, args=(tensor,))
    with in_threads(patient) as made:
        assert made == [None]
        store.answers.set()
    for one in (first, *made):
        assert torch.equal(one.to_here() if isinstance(one, rpc.RRef) else one.wait(), tensor)


def test_graceful_shutdown_waits_for_waiting_calls(agents: list[Agent], store: Store) -> None:
    future = rpc.rpc_async("w1", echo, args=(1,), timeout=0)
    assert agents[0].coordinator.active == 1
    leaving = threading.Thread(target=agents[0].shutdown)
    leaving.start()
    wait_until(lambda: agents[0].status.is_leaving)
    assert not future.done()
    store.answers.set()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()
    assert future.wait() == 1


def test_shutdown_ends_waiting_calls(agents: list[Agent]) -> None:
    future = rpc.rpc_async("w1", echo, args=(1,), timeout=0)
    agents[0].close()
    with pytest.raises((PeerLost, rpc.Cancelled)):
        future.wait()


def test_calls_made_in_the_moment_of_the_answer_do_not_overtake(
    agents: list[Agent], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[str] = []
    on_request = Agent._on_request

    def note(self: Agent, peer: Any, link: Any, frame: Any, request: Any) -> None:
        if self is agents[1]:  # functions may begin in another order
            arrived.append(request.function)
        on_request(self, peer, link, frame, request)

    monkeypatch.setattr(Agent, "_on_request", note)
    is_known, may_go_on = threading.Event(), threading.Event()
    look_up = agents[0].directory.look_up

    def look_up_slowly(*call: Any) -> Any:
        try:
            return look_up(*call)
        finally:
            if store.answers.is_set():
                is_known.set()
                may_go_on.wait(PATIENCE)

    monkeypatch.setattr(agents[0].directory, "look_up", look_up_slowly)
    calls = [rpc.rpc_async("w1", operator.neg, args=(1,), timeout=0)]
    store.answers.set()
    assert is_known.wait(PATIENCE)
    assert agents[0].directory.known("w1") is not None
    calls.append(rpc.rpc_async("w1", operator.pos, args=(2,)))
    made = rpc.remote("w1", operator.abs, args=(3,))
    threading.Timer(0.1, may_go_on.set).start()
    assert rpc.rpc_sync("w1", operator.index, args=(4,)) == 4
    assert arrived[:4] == [f"_operator:{name}" for name in ("neg", "pos", "abs", "index")]
    assert [call.wait() for call in calls] == [-1, 2]
    assert made.to_here() == 3


def times(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first * second


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("size", [3, 20_000])
def test_gradients_of_a_call_that_waits(store: Store, size: int) -> None:
    leaf = torch.full((size,), 2.0, requires_grad=True)
    with dist_autograd.context() as context:
        inner = leaf * 3
        future = rpc.rpc_async("w1", times, args=(inner, leaf))
        inner.mul_(100)  # the call has the earlier values
        assert not future.done()
        store.answers.set()
        product = future.wait()
        assert torch.equal(product, torch.full((size,), 12.0))
        dist_autograd.backward(context, [product.sum()])
        gradients = dist_autograd.get_gradients(context)
    assert torch.equal(gradients[leaf], torch.full((size,), 12.0))


@pytest.mark.usefixtures("agents")
def test_gradients_of_a_reference_that_waits(store: Store) -> None:
    leaf = torch.tensor([2.0], requires_grad=True)
    with dist_autograd.context() as context:
        product = rpc.remote("w1", times, args=(leaf, leaf))
        assert not store.answers.is_set()
        store.answers.set()
        dist_autograd.backward(context, [product.to_here()])
        assert dist_autograd.get_gradients(context) == {leaf: torch.tensor([4.0])}


def requires_grad(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.requires_grad, torch.is_grad_enabled()


@pytest.mark.usefixtures("agents")
def test_a_call_that_waits_keeps_the_mode_of_grad(store: Store) -> None:
    with dist_autograd.context(), torch.no_grad():
        future = rpc.rpc_async("w1", requires_grad, args=(torch.ones(1, requires_grad=True),))
    with dist_autograd.context(), torch.no_grad():
        other = rpc.rpc_async("w1", requires_grad, args=(torch.ones(1, requires_grad=True),))
        store.answers.set()
        assert other.wait() == (True, False)
    future.wait()  # its context has ended
