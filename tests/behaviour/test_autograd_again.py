"""Several backward passes in one context, and gradients of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import (
    DistributedRun,
    Run,
    add_weight,
    check_same,
    compare,
    doubles,
    times,
    weights,
)
from behaviour.helpers import WAYS
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent

# Of the local runs.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")

# Several passes. Gradients add up in the context, as they do in `.grad`.


def chain(run: Run) -> torch.Tensor:
    weights(run, x="w0", a="w1", b="w2")
    h = run.node(run["x"].tanh(), "h")
    first = run.call("w1", times, run, "a", h)
    return (run.call("w2", forward_to, run, "w1", first) * h).sum()


def forward_to(run: Run, to: str, x: torch.Tensor) -> torch.Tensor:
    return run.call(to, times, run, "a", x * run["b"])


def test_retain_graph_and_a_second_backward(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        loss = chain(run)
        run.backward(loss, retain_graph=True)
        run.backward(loss)

    compare(trio, program)


def test_five_backward_passes(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        loss = chain(run)
        for _ in range(5):
            run.backward(loss, retain_graph=True)

    compare(trio, program)


def test_losses_that_share_parts_one_after_another(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.call("w1", times, run, "a", run["x"])
        first = run.call("w2", times, run, "b", h).sum()
        second = run.call("w2", add_weight, run, "b", h).prod()
        run.backward(first, retain_graph=True)
        run.backward([second, h.sum()])

    compare(trio, program)


def test_losses_that_share_nothing_one_after_another(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        for _ in range(3):
            run.backward(run.call("w1", times, run, "w", run["x"]).sum())

    compare(pair, program)


def test_forward_between_two_passes(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.call("w1", times, run, "w", run["x"])
        run.backward(h.sum(), retain_graph=True)
        run.backward(run.call("w1", times, run, "w", h).sum())

    compare(pair, program)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["w0", "w1"])
def test_second_backward_without_retain_graph(pair: list[Agent], where: str, way: Any) -> None:
    """Raise also when the missing graph is one elsewhere."""
    run = DistributedRun(way)
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w=where)
        loss = run.call(where, times, run, "w", run["x"]).sum()
        run.backward(loss)
        with pytest.raises(RuntimeError, match=r"second time|retain_graph"):
            run.backward(loss)
        weights(run, y="w0")  # the context goes on
        loss = run.call(where, times, run, "w", run["y"]).sum()
        run.backward(loss)
        check_same(run.gradient("y"), run["w"].detach(), "gradient after the error")


def test_gradients_of_an_earlier_pass_are_not_changed_by_a_later_one(pair: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        loss = run.call("w1", times, run, "w", run["x"]).sum()
        run.backward(loss, retain_graph=True)
        first = run.gradient("x")
        before = first.clone()
        run.backward(loss)
        assert torch.equal(first, before)
        check_same(run.gradient("x"), before * 2, "gradient of two passes")


def test_each_context_has_gradients_of_its_own(pair: list[Agent]) -> None:
    run = DistributedRun()
    weights(run, x="w0", w="w1")
    for _ in range(3):
        with dist_autograd.context() as run.context_id:
            run.backward(run.call("w1", times, run, "w", run["x"]).sum())
            check_same(run.gradient("x"), run["w"].detach(), "gradient of one pass")


# Gradients of gradients.


def curved(run: Run, name: str, x: torch.Tensor) -> torch.Tensor:
    return (x**3 * run[name].exp()).sin()


def penalty_of(run: Run, name: str) -> torch.Tensor:
    """Return the penalty on the owner of a leaf, from its gradient so far."""
    return run.gradient(name).square().sum()


def test_create_graph_gradient_penalty_of_an_input(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        run.backward(run.call("w1", curved, run, "w", run["x"]).sum(), create_graph=True)
        gradient = run.gradient("x")
        assert gradient.requires_grad
        run.backward(gradient.square().sum())
        _break_cycles(run)

    compare(pair, program)


def _break_cycles(run: Run) -> None:
    """Locally `.grad` and its graph hold each other."""
    for leaf in run.leaves.values():
        if leaf.grad is not None:
            leaf.grad = leaf.grad.detach()


def test_create_graph_equals_torch_autograd_grad(pair: list[Agent]) -> None:
    x, w = doubles(4).requires_grad_(), doubles(4, seed=2).requires_grad_()
    (first,) = torch.autograd.grad((x**3 * w).sin().sum(), x, create_graph=True)
    expected = torch.autograd.grad(first.prod(), [x, w])
    with dist_autograd.context() as context_id:
        h = rpc.rpc_sync("w1", torch.pow, args=(x, 3))
        loss = rpc.rpc_sync("w1", torch.sin, args=(h * w,)).sum()
        dist_autograd.backward(context_id, [loss], create_graph=True)
        so_far = dist_autograd.get_gradients(context_id)
        check_same(so_far[x], first, "gradient")
        dist_autograd.backward(context_id, [so_far[x].prod()])
        total = dist_autograd.get_gradients(context_id)
        check_same(total[x] - so_far[x], expected[0], "gradient of the gradient by x")
        check_same(total[w] - so_far[w], expected[1], "gradient of the gradient by w")


def given_back(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_create_graph_under_no_grad(pair: list[Agent], to: str) -> None:
    """Keep the graph, as torch's engine does. The gradient has a local and a remote part."""

    def program(run: Run) -> Any:
        weights(run, x="w0")
        root = (run["x"] ** 3 + run.call(to, given_back, run["x"])).sum()
        with torch.no_grad():
            run.backward(root, create_graph=True)
        run.backward(run.gradient("x").square().sum())
        _break_cycles(run)

    compare(pair, program)


def test_create_graph_over_a_chain_of_workers(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.call("w1", curved, run, "a", run["x"])
        loss = (run.call("w2", curved, run, "b", h) * h).sum()
        run.backward(loss, create_graph=True)
        run.backward(run.gradient("x").square().sum())
        _break_cycles(run)

    compare(trio, program)


def test_create_graph_penalty_of_a_leaf_of_the_callee(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        run.backward(run.call("w1", curved, run, "w", run["x"]).sum(), create_graph=True)
        run.backward(run.call("w1", penalty_of, run, "w"))
        _break_cycles(run)

    compare(pair, program)


def test_create_graph_penalty_over_all_leaves_and_the_loss(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.call("w1", curved, run, "a", run["x"])
        loss = run.call("w2", curved, run, "b", h * run["x"]).sum()
        run.backward(loss, create_graph=True)
        penalty = penalty_of(run, "x")
        for to, name in (("w1", "a"), ("w2", "b")):
            penalty = penalty + run.call(to, penalty_of, run, name)
        run.backward(loss + 0.1 * penalty)
        _break_cycles(run)

    compare(trio, program)


def test_create_graph_three_times(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        loss = run.call("w1", curved, run, "w", run["x"]).sum()
        for _ in range(2):
            run.backward(loss, create_graph=True)
            loss = run.gradient("x").square().sum()
        run.backward(loss)
        _break_cycles(run)

    compare(pair, program)


def test_create_graph_of_a_module_under_a_gradient_penalty(pair: list[Agent]) -> None:
    """Punish the input's gradient of a remote critic, as Wasserstein GANs do."""

    def program(run: Run) -> Any:
        critic = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).double()
        run.module("w1", "critic", critic)
        run.leaf("w0", "x", doubles(5, 4))
        run.backward(run.call("w1", apply, run, "critic", run["x"]).sum(), create_graph=True)
        run.backward((run.gradient("x").norm(dim=1) - 1).square().mean())
        _break_cycles(run)

    compare(pair, program)


def apply(run: Run, name: str, x: torch.Tensor) -> torch.Tensor:
    return run[name](x)


def test_gradients_without_create_graph_do_not_require_grad(pair: list[Agent]) -> None:
    run = DistributedRun()
    with dist_autograd.context() as run.context_id:
        weights(run, x="w0", w="w1")
        run.backward(run.call("w1", curved, run, "w", run["x"]).sum())
        assert not run.gradient("x").requires_grad
        assert not run.call("w1", requires_grad, run, "w")


def requires_grad(run: Run, name: str) -> bool:
    return run.gradient(name).requires_grad
