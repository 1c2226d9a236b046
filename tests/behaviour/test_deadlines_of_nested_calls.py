"""Calls that a remotely called function makes have its deadline, but with compat their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from behaviour.helpers import (
    WAYS,
    Account,
    Box,
    Gate,
    proxy_async,
    proxy_sync,
    until_begun,
    wait_at,
)
from behaviour.standing_in import standing_in
from farcall import autograd, rpc
from farcall.compat.rpc.quirks import LIKE_TORCH
from farcall.runtime.agent import Agent

Call = Callable[[Gate], Any]


def never_made(gate: Gate) -> Any:
    """Return the value of a reference that is made when the gate opens."""
    return rpc.remote("w1", wait_at, args=(gate,))


def through_backward(gate: Gate) -> None:
    with autograd.context() as context:
        leaf = torch.ones(2, requires_grad=True)
        value = rpc.rpc_sync("w0", Slow.apply, args=(leaf, gate))
        autograd.backward(context, [value.sum()])


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.gate = gate
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gate.wait()
        return gradients[0], None


# Calls in a function, each of which would wait until the gate opens.
CALLS: dict[str, Call] = {
    **{way.__name__: lambda gate, way=way: way("w0", wait_at, (gate,)) for way in WAYS},
    "proxy_sync": lambda gate: proxy_sync(rpc.remote("w0", Account), "wait", gate),
    "proxy_async": lambda gate: proxy_async(rpc.remote("w0", Account), "wait", gate),
    "to_here": lambda gate: never_made(gate).to_here(),
    "backward": through_backward,
}


@pytest.fixture(params=["natively", "with compat"])
def inherits(request: pytest.FixtureRequest, start: Callable[..., list[Agent]]) -> Iterator[bool]:
    natively = request.param == "natively"
    pair = start(2, quirks=None if natively else LIKE_TORCH)
    with nullcontext() if natively else standing_in(pair):
        yield natively


def outer(call: str, started: Gate, ended: Gate, gate: Gate, box: Box) -> None:
    started.wait()
    try:
        box.put(CALLS[call](gate))
    except BaseException as error:
        box.put(error)
    ended.wait()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("transport", ["native"])
def test_a_call_that_begins_after_the_deadline_of_its_caller(
    inherits: bool, gate: Gate, call: str
) -> None:
    """Go on calling after the deadline, as a loop may that `rpc_async` started; compat lets it."""
    started, ended, box = Gate(), Gate(), Box()
    ended.open()

    def attempt(seconds: float) -> None:
        args = (call, started, ended, gate, box)
        begun = rpc.rpc_async("w1", outer, args=args, timeout=seconds)
        with pytest.raises(rpc.RpcTimeout):
            begun.wait()

    until_begun(started, attempt, 0.9)
    started.open()
    if inherits:
        error = box.wait_for()[0]
        assert type(error) is rpc.RpcTimeout
        assert "the deadline is inherited" in str(error)
        assert "outer by worker 'w0'" in str(error)
    else:
        gate.wait_for_arrivals()
        gate.open()
        assert not isinstance(box.wait_for()[0], BaseException)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("transport", ["native"])
def test_a_call_that_meets_the_deadline_of_its_caller_says_whose_it_is(
    pair: list[Agent], gate: Gate, call: str
) -> None:
    started, ended, box = Gate(), Gate(), Box()
    started.open()

    def attempt(seconds: float) -> None:
        args = (call, started, ended, gate, box)
        begun = rpc.rpc_async("w1", outer, args=args, timeout=seconds)
        # The function has not ended: a value that came right at the deadline would count.
        with pytest.raises(rpc.RpcTimeout) as own:
            begun.wait()
        assert "inherited" not in str(own.value)

    until_begun(started, attempt, 0.9)
    error = box.wait_for()[0]
    ended.open()
    assert type(error) is rpc.RpcTimeout
    assert "the deadline is inherited" in str(error)
    assert "outer by worker 'w0'" in str(error)


@pytest.mark.parametrize("transport", ["native"])
def test_a_timeout_of_its_own_that_is_shorter_is_not_called_inherited(
    pair: list[Agent], gate: Gate
) -> None:
    def call_shortly(gate: Gate) -> str:
        try:
            rpc.rpc_sync("w0", wait_at, args=(gate,), timeout=0.05)
        except rpc.RpcTimeout as error:
            return str(error)
        return ""

    assert "inherited" not in rpc.rpc_sync("w1", call_shortly, args=(gate,))
