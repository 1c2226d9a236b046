"""Calls in the traces of torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import profile

from farcall import autograd as dist_autograd
from farcall import rpc

pytestmark = pytest.mark.usefixtures("pair")
X = torch.ones(3, 3)
ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


class Scale:
    def __init__(self) -> None:
        self.by = 2

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def fail() -> None:
    raise ValueError("on purpose")


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Names of the events of all threads, when the block is over."""
    names: list[str] = []
    with profile(experimental_config=ALL_THREADS) as profiler:
        yield names
    names += [event.name for event in profiler.events() or ()]


def test_calls_are_events() -> None:
    with recorded() as names:
        rpc.rpc_sync("w1", product, args=(X,))
        rpc.rpc_async("w1", torch.add, args=(X, 1)).wait()
        rpc.remote("w1", product, args=(X,)).to_here()
    assert "rpc_sync#product(w0 -> w1)" in names
    assert "rpc_async#aten::add(w0 -> w1)" in names
    assert "rpc_remote#product(w0 -> w1)" in names


def test_callee_has_the_function_and_its_operators() -> None:
    with recorded() as names:
        rpc.rpc_sync("w1", product, args=(X,))
    assert f"rpc#{__name__}:product(w0 -> w1)" in names
    assert "aten::mm" in names


def test_methods_through_references_are_events() -> None:
    rref: Any = rpc.remote("w1", Scale)
    with recorded() as names:
        rref.rpc_sync().apply(X)
        rref.rpc_async().apply(X).wait()
        rref.remote().apply(X).to_here()
    assert {f"rpc_{kind}#apply(w0 -> w1)" for kind in ("sync", "async", "remote")} <= set(names)


def test_backward_passes_are_events_and_their_messages_begin_inside() -> None:
    x = torch.rand(3, 3, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", product, args=(x,)).sum()
        with profile(experimental_config=ALL_THREADS) as profiler:
            dist_autograd.backward(context_id, [loss])
    events = {event.name: event for event in profiler.events() or ()}
    prefix = "torch::distributed::autograd::"
    whole = events[prefix + "backward"]
    for name in ("SendRpcBackward", "RecvRpcBackward"):
        # The end of one elsewhere may be noted after that of the pass.
        begins = events[prefix + name].time_range.start
        assert whole.time_range.start <= begins <= whole.time_range.end


def test_event_of_a_call_that_fails_ends() -> None:
    with recorded() as names:
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("w1", fail)
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_async("w1", fail).wait()
    assert {"rpc_sync#fail(w0 -> w1)", "rpc_async#fail(w0 -> w1)"} <= set(names)
