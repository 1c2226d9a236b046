"""Distributed autograd through references, their proxies, and `async_execution`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import DistributedRun, Run, compare, doubles, times, weights
from behaviour.helpers import PROXIES, Here, by_async, by_sync
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent

async_execution = rpc.functions.async_execution


class Layer(Here):
    """A value with a leaf of its owner; arrives as itself."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__()
        self.run, self.name = run, name

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return times(self.run, self.name, x) * scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Stack(Here):
    """Holds references to layers elsewhere and runs them one after another."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.rpc_sync().forward(x)
        return x


def make_tensor(run: Run, name: str) -> torch.Tensor:
    return run[name].exp()


def multiply_by(rref: Any, x: torch.Tensor) -> torch.Tensor:
    return rref.to_here() * x


# Values of references.


def test_remote_and_to_here(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        return run.remote("w1", times, run, "w", run["x"]).to_here().sum()

    compare(pair, program, ways=[by_sync])


def test_to_here_twice(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        rref = run.remote("w1", times, run, "w", run["x"])
        return (rref.to_here() * rref.to_here().sin()).sum()

    compare(pair, program, ways=[by_sync])


def test_reference_argument_that_the_owner_reads(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        rref = run.remote("w1", make_tensor, run, "w")
        return run.call("w1", multiply_by, rref, run["x"]).sum()

    compare(pair, program)


def test_reference_argument_that_a_third_worker_fetches(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        rref = run.remote("w1", make_tensor, run, "w")
        return run.call("w2", multiply_by, rref, run["x"]).sum()

    compare(trio, program)


def test_reference_argument_to_a_value_of_the_caller(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w0")
        rref = run.rref(run["w"].exp())
        return (run.call("w1", multiply_by, rref, run["x"]) * rref.local_value()).sum()

    compare(pair, program)


def test_reference_to_a_leaf(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        rref = run.remote("w1", run.__getitem__, "w")
        first = run.call("w2", multiply_by, rref, run["x"])
        second = run.call("w1", multiply_by, rref, run["x"])
        return (first * second).sum()

    compare(trio, program)


def test_references_in_containers(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        rrefs = [run.remote(to, make_tensor, run, name) for to, name in (("w1", "a"), ("w2", "b"))]
        return run.call("w1", multiply_all, {"factors": rrefs}, run["x"]).sum()

    compare(trio, program)


def multiply_all(references: dict[str, list[Any]], x: torch.Tensor) -> torch.Tensor:
    for rref in references["factors"]:
        x = rref.to_here() * x
    return x


def test_value_made_outside_of_the_context_has_its_gradient_on_the_owner(pair: list[Agent]) -> None:
    leaf = doubles(4).requires_grad_()
    box = DistributedRun()
    box.leaf("w1", "w", leaf)
    rref = rpc.remote("w1", box.__getitem__, args=("w",))
    rref.to_here()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(rref.to_here() ** 2).sum()])
        found = rpc.rpc_sync("w1", gradient_of, args=(context_id, rref))
        assert torch.equal(found, 2 * leaf.detach())


def gradient_of(context_id: int, rref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return dist_autograd.get_gradients(context_id)[rref.local_value()]


# Proxies.


@pytest.mark.parametrize("proxy", PROXIES)
def test_method_of_a_remote_value(pair: list[Agent], proxy: Any) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        layer = run.remote("w1", Layer, run, "w")
        h = proxy(layer, "forward", run["x"].tanh(), scale=0.5)
        return proxy(layer, "__call__", h).sum()

    compare(pair, program, ways=[by_sync])


@pytest.mark.parametrize("proxy", PROXIES)
def test_method_of_an_own_value(pair: list[Agent], proxy: Any) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w0")
        layer = run.rref(Layer(run, "w"))
        return proxy(layer, "forward", run["x"].tanh()).sum()

    compare(pair, program, ways=[by_sync])


def test_module_of_remote_layers_that_is_itself_remote(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w0", b="w1", c="w2")
        places = (("w2", "c"), ("w0", "a"), ("w1", "b"))
        layers = [run.remote(to, Layer, run, name) for to, name in places]
        stack = run.remote("w1", Stack, layers)
        return stack.rpc_sync().forward(run["x"]).sum()

    compare(trio, program, ways=[by_sync])


def test_reference_to_a_result_of_a_method(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        layer = run.remote("w1", Layer, run, "w")
        first = layer.remote().forward(run["x"])
        second = layer.remote().forward(run["x"] * 2)
        return run.call("w1", multiply_by, first, second.to_here()).sum()

    compare(pair, program)


# Functions that give futures.


@async_execution
def from_call(run: Run, to: str, x: torch.Tensor) -> Any:
    return run.call_async(to, times, run, f"of {to}", x)


@async_execution
def from_then(run: Run, to: str, x: torch.Tensor) -> Any:
    future = run.call_async(to, times, run, f"of {to}", x)
    return future.then(lambda done: done.wait() * run["a"])


@async_execution
def chained(run: Run, route: list[str], x: torch.Tensor) -> Any:
    """Hand on to the next worker of the route, and work on its result."""
    if not route:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(x * 2)
        return future
    called = run.call_async(route[0], chained, run, route[1:], x * run["a"].detach())
    return called.then(lambda done: run.node(done.wait() + x, f"after {len(route)}"))


@async_execution
def call_in_then(run: Run, x: torch.Tensor) -> Any:
    """Make the next call in a callback, where the context is active, too."""
    first = run.call_async("w2", times, run, "of w2", x)
    return first.then(lambda done: run.call("w0", times, run, "of w0", done.wait() + run["a"]))


@async_execution
def collected(run: Run, x: torch.Tensor) -> Any:
    futures = [run.call_async(to, times, run, f"of {to}", x) for to in ("w0", "w2")]
    return torch.futures.collect_all(futures).then(
        lambda done: torch.stack([future.wait() for future in done.wait()]).prod(0) * run["a"]
    )


def places(run: Run) -> None:
    weights(run, x="w0", a="w1")
    weights(run, **{f"of {name}": name for name in ("w0", "w1", "w2")})


@pytest.mark.parametrize("handler", [from_call, from_then])
@pytest.mark.parametrize("to", ["w0", "w1", "w2"])
def test_async_execution(trio: list[Agent], handler: Any, to: str) -> None:
    def program(run: Run) -> Any:
        places(run)
        return run.call("w1", handler, run, to, run["x"]).sum()

    compare(trio, program)


@pytest.mark.parametrize("handler", [call_in_then, collected])
def test_async_execution_of_several_calls(trio: list[Agent], handler: Any) -> None:
    def program(run: Run) -> Any:
        places(run)
        return run.call("w1", handler, run, run["x"]).sum()

    compare(trio, program)


def test_async_execution_chained_over_workers(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        places(run)
        return run.call("w1", chained, run, ["w2", "w0", "w2", "w1"], run["x"]).sum()

    compare(trio, program)


def test_then_of_the_caller(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        future = run.call_async("w1", times, run, "w", run["x"])
        later = future.then(lambda done: run.call("w1", times, run, "w", done.wait().sin()))
        return later.wait().sum()

    compare(pair, program, ways=[by_async])
