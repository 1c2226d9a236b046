"""Distributed autograd over graphs of every shape: gradients equal those of one process (BWD-1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import Run, add_weight, compare, doubles, times, weights
from behaviour.helpers import by_async, by_sync
from farcall.runtime.agent import Agent


def test_one_call(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        return run.call("w1", times, run, "w", run["x"]).sum()

    compare(pair, program)


def test_built_in_function_whose_result_is_the_root(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0")
        return run.call("w1", torch.dot, run["x"], run["y"])

    compare(pair, program)


def test_no_call_at_all(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        return (run["x"] ** 2).sum()

    compare(pair, program)


def test_result_that_requires_grad_from_arguments_that_do_not(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, w="w1")
        return run.call("w1", times, run, "w", doubles(4)).sum()

    compare(pair, program)


def test_leaf_as_the_result(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, w="w1")
        return (run.call("w1", run.__getitem__, "w") ** 2).sum()

    compare(pair, program)


def make_leaf(run: Run, worker: str, name: str) -> torch.Tensor:
    return run.leaf(worker, name, doubles(4))


def test_leaf_that_the_callee_makes(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        return run.call("w1", make_leaf, run, "w1", "made").prod()

    compare(pair, program)


# Chains.


def test_chain_over_several_workers(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2", c="w0")
        h = run.call("w1", times, run, "a", run["x"])
        h = run.call("w2", times, run, "b", h.tanh())
        h = run.call("w0", times, run, "c", h.exp())
        return h.sum()

    compare(trio, program)


def pass_on(run: Run, route: list[tuple[str, str]], x: torch.Tensor) -> torch.Tensor:
    """Works on `x` on each worker of the route before and after all that follow."""
    if not route:
        return x
    (_, name), *rest = route
    h = times(run, name, x)
    if rest:
        h = run.call(rest[0][0], pass_on, run, rest, h)
    return run.node(h * run[name].cos(), f"after {name}")


def test_nested_calls(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        route = [("w1", "a"), ("w2", "b")]
        return run.call("w1", pass_on, run, route, run["x"]).sum()

    compare(trio, program)


def test_nested_calls_that_come_back_to_every_worker(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w0", b="w1", c="w2")
        route = [("w1", "b"), ("w2", "c"), ("w0", "a"), ("w2", "c2"), ("w1", "b2"), ("w0", "a2")]
        weights(run, a2="w0", b2="w1", c2="w2")
        return run.call("w1", pass_on, run, route, run["x"]).sum()

    compare(trio, program)


@pytest.mark.parametrize("length", [1, 2, 5, 20])
def test_cycle_between_two_workers(pair: list[Agent], length: int) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w0", b="w1")
        h = run["x"]
        for _ in range(length):
            h = run.call("w1", add_weight, run, "b", h * run["a"])
        return (h**2).sum()

    compare(pair, program)


def ping_pong(run: Run, depth: int, me: str, other: str, x: torch.Tensor) -> torch.Tensor:
    h = add_weight(run, me, x)
    if depth:
        h = run.call(other, ping_pong, run, depth - 1, other, me, h * run[me])
    return h


def test_cycle_of_nested_calls(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w0="w0", w1="w1")
        return (run.call("w1", ping_pong, run, 5, "w1", "w0", run["x"]) ** 2).sum()

    compare(pair, program)


def test_call_to_oneself(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w0")
        h = run.call("w0", times, run, "w", run["x"] * 2)
        return (h * run["w"] * run["x"]).sum()

    compare(pair, program)


def test_nested_call_to_oneself(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w1")
        route = [("w1", "a"), ("w1", "b")]
        return run.call("w1", pass_on, run, route, run["x"]).sum()

    compare(pair, program)


# Fans.


def test_fan_out_and_fan_in(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2", c="w0")
        h = run.node(run["x"].tanh(), "shared")
        parts = [
            run.call(to, times, run, name, h)
            for to, name in (("w1", "a"), ("w2", "b"), ("w0", "c"))
        ]
        return (parts[0] * parts[1] + parts[2]).sum()

    compare(trio, program)


def test_fan_out_of_calls_at_once(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.node(run["x"].tanh(), "shared")
        futures = [
            run.call_async(to, times, run, name, h)
            for to, name in (("w1", "a"), ("w2", "b"), ("w1", "a"), ("w2", "b"))
        ]
        return torch.stack([future.wait() for future in futures]).prod(0).sum()

    compare(trio, program, ways=[by_sync])


def both(run: Run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = run.node(x * run["a"], "shared on w1")
    return h.sin(), h.cos()


def test_fan_in_on_a_third_worker(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        sine, cosine = run.call("w1", both, run, run["x"])
        return run.call("w2", torch.add, sine, cosine * 2).sum()

    compare(trio, program)


def gather(run: Run, x: torch.Tensor, workers: list[str]) -> torch.Tensor:
    h = run.node(x * run["a"], "before")
    futures = [run.call_async(to, add_weight, run, f"of {to}", h) for to in workers]
    return run.node(torch.stack([future.wait() for future in futures]).prod(0), "after")


def test_callee_that_fans_out_and_in(start: Callable[..., list[Agent]]) -> None:
    agents = start(4)

    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        workers = ["w0", "w2", "w3", "w1"]
        weights(run, **{f"of {worker}": worker for worker in workers})
        return run.call("w1", gather, run, run["x"], workers).sum()

    compare(agents, program)


def test_diamond_of_diamonds(start: Callable[..., list[Agent]]) -> None:
    agents = start(4)

    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2", c="w3")
        h = run["x"]
        for _ in range(4):
            left = run.call("w1", times, run, "a", h)
            right = run.call("w2", times, run, "b", h)
            h = run.call("w3", torch.add, left, right).tanh()
        return h.sum()

    compare(agents, program)


# Roots.


def test_several_roots_on_one_worker(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.call("w1", times, run, "a", run["x"])
        g = run.call("w2", times, run, "b", h)
        return [h.sum(), g.sum(), (h * g).sum(), run["x"].sum()]

    compare(trio, program)


def test_same_root_twice(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        root = run.call("w1", times, run, "a", run["x"]).sum()
        return [root, root]

    compare(pair, program)


def test_backward_of_a_part_that_runs_in_a_callee(pair: list[Agent]) -> None:
    """Run backward in the callee, and give gradients to its leaves and to the caller's."""

    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        run.call("w1", backward_there, run, run["x"] * 2)

    compare(pair, program, ways=[by_sync, by_async])


def backward_there(run: Run, x: torch.Tensor) -> None:
    run.backward((x * run["a"]).sum())
