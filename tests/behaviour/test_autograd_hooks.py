"""Hooks in distributed backward passes: called as often, and with the same gradients, as locally.

The hooks change gradients in ways that differ when a hook sees parts of a gradient one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import Run, add_weight, compare, doubles, times, weights
from farcall.runtime.agent import Agent


def bent(gradient: torch.Tensor) -> torch.Tensor:
    """Return a function of the whole gradient that differs from the sum of those of its parts."""
    return gradient.square() * gradient.sign() + 0.5


def hooked_times(run: Run, name: str, x: torch.Tensor, where: str) -> torch.Tensor:
    x = run.arrived(x)
    if where == "arrived":
        run.hook(x, f"{name} arrived", bent)
    h = x.sin()
    if where == "inside":
        run.hook(h, f"{name} inside", bent)
    result = h * run[name]
    if where == "result":
        run.hook(result, f"{name} result", bent)
    return result


# Hooks on tensors.


@pytest.mark.parametrize("where", ["arrived", "inside", "result"])
def test_hook_in_a_callee(pair: list[Agent], where: str) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        return run.call("w1", hooked_times, run, "w", run["x"], where).sum()

    compare(pair, program)


@pytest.mark.parametrize("where", ["arrived", "inside", "result"])
def test_hook_in_a_callee_that_is_called_twice(pair: list[Agent], where: str) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.call("w1", hooked_times, run, "w", run["x"], where)
        return (run.call("w1", hooked_times, run, "w", h, where) * h).sum()

    compare(pair, program)


def test_hook_on_a_tensor_that_is_sent(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.hook(run["x"].tanh(), "sent", bent)
        return run.call("w1", times, run, "w", h).sum()

    compare(pair, program)


def test_hook_on_a_tensor_that_is_sent_several_times_and_used_here(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.hook(run["x"].tanh(), "sent", bent)
        first = run.call("w1", times, run, "a", h)
        second = run.call("w2", times, run, "b", h)
        third = run.call("w1", add_weight, run, "a", h)
        return (first * second * h + third).sum()

    compare(trio, program)


def test_hook_on_a_result_that_arrived(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.arrived(run.call("w1", times, run, "w", run["x"]))
        run.hook(h, "arrived", bent)
        return (h.sin() * h).sum()

    compare(pair, program)


def test_hook_on_a_tensor_that_arrived_and_is_sent_on(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.arrived(run.call("w1", times, run, "a", run["x"]))
        run.hook(h, "arrived", bent)
        return (run.call("w2", times, run, "b", h) * h).sum()

    compare(trio, program)


def test_hooks_on_one_tensor_run_in_their_order(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run["x"].tanh()
        run.hook(h, "first", lambda gradient: gradient + 1)
        run.hook(h, "second", bent)
        run.hook(h, "third", lambda gradient: gradient * 3)
        return (run.call("w1", times, run, "w", h) * h).sum()

    compare(pair, program)


def test_hook_that_was_removed_is_not_called(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run["x"].tanh()
        h.register_hook(lambda gradient: run.count("removed")).remove()
        return run.call("w1", times, run, "w", h).sum()

    compare(pair, program)


def test_hook_on_the_root(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0", w="w1")
        own = run.hook(run.call("w1", times, run, "w", run["x"]).sum(), "own", bent)
        arrived = run.arrived(run.call("w1", torch.dot, run["x"], run["y"]))
        return [own, run.hook(arrived, "arrived", bent)]

    compare(pair, program)


# Hooks on leaves.


def test_hook_on_a_leaf_of_the_caller(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        run.hook(run["x"], "leaf", bent)
        first = run.call("w1", times, run, "a", run["x"])
        second = run.call("w2", times, run, "b", run["x"] * 2)
        return (first * second + run["x"] ** 3).sum()

    compare(trio, program)


def test_hook_on_a_leaf_of_the_callee(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        run.hook(run["a"], "leaf", bent)
        first = run.call("w1", times, run, "a", run["x"])
        second = run.call("w1", times, run, "a", first.sin())
        return run.call("w2", torch.mul, second, run.call("w1", run.__getitem__, "a")).sum()

    compare(trio, program)


def test_hook_on_a_leaf_that_only_an_unused_part_reaches(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w1")
        run.hook(run["b"], "unused", bent)
        run.call("w1", times, run, "b", run["x"])
        return run.call("w1", times, run, "a", run["x"]).sum()

    compare(pair, program)


# Hooks on nodes.


def with_node_hooks(run: Run, name: str, x: torch.Tensor) -> torch.Tensor:
    h = run.arrived(x) * run[name]
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: _counted(run, f"before {name}", gradients))
    h.grad_fn.register_hook(lambda inputs, outputs: _counted(run, f"after {name}", inputs))
    return h


def _counted(run: Run, name: str, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    run.count(name)
    return tuple(None if gradient is None else bent(gradient) for gradient in gradients)


def test_hooks_on_a_node(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", v="w0", w="w1")
        shared = with_node_hooks(run, "v", run["x"])
        return (run.call("w1", with_node_hooks, run, "w", shared) * shared).sum()

    compare(pair, program)


# retain_grad.


def retaining(run: Run, x: torch.Tensor) -> torch.Tensor:
    x = run.arrived(x)
    h = x.sin() * run["w"]
    for name, tensor in (("arrived there", x), ("inside", h)):
        tensor.retain_grad()
        run.note(name, tensor)
    return h


def test_retain_grad_of_intermediates(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        sent = run["x"].tanh()
        arrived = run.arrived(run.call("w1", retaining, run, sent))
        root = (arrived * sent).sum()
        for name, tensor in (("sent", sent), ("arrived", arrived), ("root", root)):
            tensor.retain_grad()
            run.note(name, tensor)
        run.backward(root)
        for name, tensor in run.noted.items():
            assert tensor.grad is not None, name
            run.noted[name] = tensor.grad

    compare(pair, program)


# Hooks of modules.


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6, dtype=torch.float64)
        self.second = torch.nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def apply_module(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run["block"](run.arrived(x))


def bend_inputs(run: Run, name: str) -> Callable[..., Any]:
    def hook(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        run.count(f"{name} of {type(module).__name__}")
        return tuple(None if gradient is None else bent(gradient) for gradient in inputs)

    return hook


def bend_outputs(run: Run, name: str) -> Callable[..., Any]:
    def hook(module: torch.nn.Module, outputs: Any) -> Any:
        run.count(f"{name} of {type(module).__name__}")
        return tuple(bent(gradient) for gradient in outputs)

    return hook


@pytest.mark.parametrize("hooks", ["full", "pre", "both"])
def test_full_backward_hooks_of_modules(pair: list[Agent], hooks: str) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        block = run.module("w1", "block", Block())
        for module in (block, block.first, block.second):
            if hooks != "pre":
                module.register_full_backward_hook(bend_inputs(run, "after"))
            if hooks != "full":
                module.register_full_backward_pre_hook(bend_outputs(run, "before"))
        h = run.call("w1", apply_module, run, run["x"].tanh())
        return run.call("w1", apply_module, run, h).sum()

    compare(pair, program)


# Functions of the user.


class Cube(torch.autograd.Function):
    """Has an input without a gradient, and counts its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor, run: Run) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.run = run
        return x**3 + 0 * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.run.count("cube")
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient, None, None


class Halves(torch.autograd.Function):
    """Has two outputs, does not take zeros for a missing gradient, and can't differentiate one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Run) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run = run
        middle = len(x) // 2
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        ctx.length = len(x)
        return x[:middle].clone(), x[middle:].clone(), order

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, order: Any) -> Any:
        ctx.run.count(f"halves {first is None} {second is None}")
        if first is None:
            first = second.new_zeros(ctx.length // 2)
        if second is None:
            second = first.new_zeros(ctx.length - ctx.length // 2)
        return torch.cat([first, second]), None


def cube(run: Run, x: torch.Tensor) -> torch.Tensor:
    return Cube.apply(x, run["w"], run)


def halves(run: Run, x: torch.Tensor) -> Any:
    return Halves.apply(x * run["w"], run)


def test_custom_function_on_a_callee_with_an_input_that_has_no_gradient(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.call("w1", cube, run, run["x"])
        return (run.call("w1", cube, run, h.tanh()) * h).sum()

    compare(pair, program)


def no_gradient_back(run: Run, x: torch.Tensor) -> torch.Tensor:
    return Cube.apply(run["w"], x, run)


def test_custom_function_that_gives_no_gradient_to_an_arrived_tensor(pair: list[Agent]) -> None:
    """Reach the sender, but give it no gradient: its leaves have none, and no worker hangs."""

    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0", w="w1")
        sent = run.call("w1", torch.sin, run["x"])
        h = run.call("w1", no_gradient_back, run, sent)
        return (h * run["y"]).sum()

    compare(pair, program)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_custom_function_with_outputs_of_which_some_are_used(
    pair: list[Agent], used: tuple[int, ...]
) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        outputs = run.call("w1", halves, run, run["x"])
        assert not outputs[2].requires_grad
        return torch.stack([outputs[index] for index in used]).prod(0).sum()

    compare(pair, program)


def test_custom_function_whose_outputs_go_different_ways(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w0")
        first, second, _ = halves(run, run["x"])
        sent = run.call("w1", torch.sin, second)
        return (first * run.call("w2", torch.cos, sent)).sum() + doubles(2).dot(first)

    compare(trio, program)
