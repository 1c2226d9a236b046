"""A call that failed keeps nothing alive: no argument, no variable of a frame, no reference."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from behaviour.helpers import Deaths, Gate, wait_at, wait_until
from farcall import autograd, rpc
from farcall.errors import SerializationError
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Turn the garbage collector off, which holds values, and memory, for an unknown time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fail(deaths: Deaths, argument: Any = None) -> None:
    local = deaths.make("local of the function")
    raise ValueError("failed", local.get())


def fail_from(deaths: Deaths) -> None:
    local = deaths.make("local of the function")
    try:
        raise KeyError(local.get())
    except KeyError as error:
        raise ValueError("failed") from error


def give_lock(deaths: Deaths) -> Any:
    local = deaths.make("local of the function")
    return threading.Lock(), local.get()


@rpc.functions.async_execution
def fail_later(deaths: Deaths) -> rpc.Future[Any]:
    local = deaths.make("local of the function")
    future: rpc.Future[Any] = rpc.Future()
    try:
        raise ValueError(local.get())
    except ValueError as error:
        future.set_exception(error)
    return future


class Failing:
    def __init__(self, deaths: Deaths) -> None:
        self.deaths = deaths

    def fail(self) -> None:
        fail(self.deaths)


class FailingBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, deaths: Deaths) -> torch.Tensor:
        ctx.deaths = deaths
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        fail(ctx.deaths)


def through_failing(value: torch.Tensor, deaths: Deaths) -> torch.Tensor:
    return FailingBackwards.apply(value, deaths)


class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        fail(self.defaults["deaths"])

    def __init__(self, params: Any, deaths: Deaths) -> None:
        super().__init__(params, lr=0.1)
        self.defaults["deaths"] = deaths


def total(parameter: rpc.RRef[Any]) -> torch.Tensor:
    return (parameter.local_value() * 2).sum()


def by_backward(to: str, deaths: Deaths) -> None:
    with autograd.context() as context:
        value = rpc.rpc_sync(to, through_failing, (torch.ones(2, requires_grad=True), deaths))
        autograd.backward(context, [value.sum()])


def by_optimizer(to: str, deaths: Deaths) -> None:
    parameter = rpc.remote(to, torch.nn.Parameter, args=(torch.ones(2),))
    optimizer = DistributedOptimizer(FailingOptimizer, [parameter], deaths=deaths)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(to, total, args=(parameter,))])
        optimizer.step(context)


def several_times(rref: rpc.RRef[Any]) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="failed"):
            rref.to_here()
    rref.to_here()


def ignored(future: rpc.Future[Any]) -> None:
    raise ValueError(future.done())


CALLS: dict[str, Callable[[str, Deaths], Any]] = {
    "rpc_sync": lambda to, deaths: rpc.rpc_sync(to, fail, (deaths,)),
    "with a cause": lambda to, deaths: rpc.rpc_sync(to, fail_from, (deaths,)),
    "rpc_async": lambda to, deaths: rpc.rpc_async(to, fail, (deaths,)).wait(),
    "then": lambda to, deaths: rpc.rpc_async(to, fail, (deaths,)).then(lambda f: f.wait()).wait(),
    "ignored future": lambda to, deaths: ignored(rpc.rpc_async(to, fail, (deaths,))),
    "to_here": lambda to, deaths: rpc.remote(to, fail, (deaths,)).to_here(),
    "to_here again": lambda to, deaths: several_times(rpc.remote(to, fail, (deaths,))),
    "async_execution": lambda to, deaths: rpc.rpc_sync(to, fail_later, (deaths,)),
    "value of it": lambda to, deaths: rpc.remote(to, fail_later, (deaths,)).to_here(),
    "proxy": lambda to, deaths: rpc.remote(to, Failing, (deaths,)).rpc_sync().fail(),
    "proxy of a failed value": lambda to, deaths: rpc.remote(to, fail, (deaths,)).rpc_sync().x(),
    "result that can't be sent": lambda to, deaths: rpc.rpc_sync(to, give_lock, (deaths,)),
    "backward": by_backward,
    "optimizer": by_optimizer,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("to", ["w1", "w0"])
def test_nothing_of_a_call_that_failed_is_left(
    pair: list[Agent], to: str, call: Callable[[str, Deaths], Any]
) -> None:
    deaths = Deaths()

    def use() -> None:
        mine = deaths.make("local of the caller")
        with pytest.raises((ValueError, SerializationError)):
            call(to, deaths)
        assert mine.get() is not None

    use()
    if call is by_optimizer:
        gc.collect()  # an optimizer of torch refers to itself
    assert set(deaths.wait_for(2)) == {"local of the caller", "local of the function"}
    assert_no_references(pair)


def assert_no_references(agents: list[Agent]) -> None:
    for agent in agents:
        wait_until(lambda agent=agent: not agent.references._values)
        wait_until(lambda agent=agent: not agent.coordinator.active)
        wait_until(lambda agent=agent: not agent.references._creation_errors)


def test_nothing_is_left_of_an_argument_that_can_not_be_sent(pair: list[Agent]) -> None:
    deaths = Deaths()

    def use() -> None:
        mine = deaths.make("argument")
        with pytest.raises(SerializationError):
            rpc.rpc_async("w1", id, (mine, threading.Lock()))
        with pytest.raises(SerializationError):
            rpc.remote("w1", id, (mine, threading.Lock()))

    use()
    assert deaths.wait_for(1) == ["argument"]
    assert_no_references(pair)


def test_nothing_is_left_of_a_call_that_was_late(pair: list[Agent], gate: Gate) -> None:
    deaths = Deaths()

    def use() -> None:
        mine = deaths.make("mine")
        for _ in range(2):
            with pytest.raises(rpc.RpcTimeout):
                rpc.rpc_async("w1", wait_at, (gate, mine.get()), timeout=0.01).wait()

    use()
    assert deaths.wait_for(1) == ["mine"]
    gate.open()
    assert_no_references(pair)
