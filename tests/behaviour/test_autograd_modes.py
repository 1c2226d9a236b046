"""Tensors that the loss does not use: nothing in SMART mode, an error in FAST mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import DistributedRun, Run, compare, doubles, times, weights
from behaviour.helpers import by_async, by_sync
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent

each_mode = pytest.mark.parametrize("mode", ["smart", "fast"])


def three(run: Run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three results of three leaves of w1."""
    return x * run["a"], x + run["b"].sin(), x - run["c"].cos()


def start_leaves(run: Run) -> None:
    weights(run, x="w0", a="w1", b="w1", c="w1")


# SMART.


def test_smart_results_that_are_not_used(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        run.call("w1", three, run, run["x"])
        _, used, _ = run.call("w1", three, run, run["x"])
        run.call("w1", times, run, "c", used)
        return used.prod()

    compare(pair, program)


def test_smart_whole_chain_that_is_not_used(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.call("w1", times, run, "a", run["x"])
        g = run.call("w2", times, run, "b", h)
        run.call("w1", times, run, "a", g)
        return (run["x"] * 2).sum()

    compare(trio, program)


def test_smart_arguments_that_are_not_used(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0", w="w1")
        sent = run.node(run["x"].sin(), "used"), run.node(run["y"].cos(), "not used")
        return run.call("w1", use_first, run, *sent).sum()

    compare(pair, program)


def use_first(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * run["w"]


def test_smart_calls_whose_results_never_require_grad(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        x = run["x"]
        index = run.call("w1", torch.argmax, x)
        detached = run.call("w1", torch.Tensor.detach, x)
        nothing = run.call("w1", give_nothing, x)
        assert nothing is None
        assert not index.requires_grad
        assert not detached.requires_grad
        return (x * detached)[index] + run.call("w1", three, run, x)[0].sum()

    compare(pair, program)


def give_nothing(x: torch.Tensor) -> None:
    return None


def test_smart_results_of_which_some_require_grad(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        first, plain, number, last = run.call("w1", mixed, run, run["x"], doubles(4))
        assert not plain.requires_grad
        assert number == 3
        return (first * plain * last * number).sum()

    compare(pair, program)


def mixed(run: Run, x: torch.Tensor, plain: torch.Tensor) -> Any:
    return x * run["a"], plain * 2, 3, x.sin()


def test_smart_loss_without_any_call(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        run.call("w1", three, run, run["x"])
        return run["x"].sum()

    compare(pair, program)


def test_smart_branches_that_differ_per_step(trio: list[Agent]) -> None:
    for step in range(6):

        def program(run: Run, step: int = step) -> Any:
            weights(run, x="w0", a="w1", b="w2")
            h = run.call("w1", branch, run, step, run["x"])
            if step % 3 == 2:
                h = run.call("w1", times, run, "a", h)
            return h.sum()

        compare(trio, program, ways=[by_sync, by_async])


def branch(run: Run, step: int, x: torch.Tensor) -> torch.Tensor:
    if step % 2:
        return run.call("w2", times, run, "b", x * run["a"])
    run.call("w2", times, run, "b", x)
    return x.sin()


def test_smart_call_that_failed_before(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        with pytest.raises(ZeroDivisionError):
            run.call("w1", fail_after_use, run, run["x"])
        return run.call("w1", three, run, run["x"])[0].sum()

    compare(pair, program)


def fail_after_use(run: Run, x: torch.Tensor) -> None:
    raise ZeroDivisionError(f"after {(x * run['a']).sum()}")


def test_smart_roots_of_which_one_uses_nothing_remote(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        weights(run, y="w0")
        first, _, _ = run.call("w1", three, run, run["x"])
        return [first.sum(), (run["y"] * 2).sum()]

    compare(pair, program)


def test_smart_is_the_default(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        return run.call("w1", three, run, run["x"])[1].sum()

    compare(pair, program)
    compare(pair, program, mode="smart")


# FAST: every value that was sent must be used.


@each_mode
def test_either_mode_when_all_is_used(trio: list[Agent], mode: str) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w2")
        h = run.node(run["x"].tanh(), "h")
        first = run.call("w1", times, run, "a", h)
        second = run.call("w2", times, run, "b", first)
        third = run.call("w1", there_and_back, run, second)
        return (h * third).sum()

    compare(trio, program, mode=mode)


def there_and_back(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run.call("w0", times, run, "x", x * run["a"]) * x


@each_mode
def test_either_mode_in_a_second_context(pair: list[Agent], mode: str) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        return run.call("w1", times, run, "w", run["x"]).sum()

    for _ in range(3):
        compare(pair, program, mode=mode)


def result_not_used(run: Run) -> Any:
    run.call("w1", times, run, "a", run["x"])
    return run.call("w1", times, run, "b", run["x"]).sum()


def one_of_several_results_used(run: Run) -> Any:
    return run.call("w1", three, run, run["x"])[0].sum()


def argument_not_used(run: Run) -> Any:
    weights(run, y="w0", w="w1")
    return run.call("w1", use_first, run, run["x"] * 2, run["y"] * 2).sum()


def nothing_remote_used(run: Run) -> Any:
    run.call("w1", times, run, "a", run["x"])
    return run["x"].sum()


def end_of_a_chain_not_used(run: Run) -> Any:
    h = run.call("w1", times, run, "a", run["x"])
    run.call("w1", times, run, "b", h)
    return h.sum()


def sent_part_of_the_loss_not_used(run: Run) -> Any:
    h = run["x"].tanh()
    run.call("w1", times, run, "a", h)
    return h.sum()


def one_of_two_calls_not_used(run: Run) -> Any:
    h = run["x"].tanh()
    run.call("w1", times, run, "a", h)
    return run.call("w1", times, run, "b", h).sum()


def nested_call_not_used(run: Run) -> Any:
    return run.call("w1", call_in_vain, run, run["x"]).sum()


def call_in_vain(run: Run, x: torch.Tensor) -> torch.Tensor:
    h = x.sin()
    run.call("w0", torch.cos, h)
    return h * run["a"]


@pytest.mark.parametrize(
    "wasteful",
    [
        result_not_used,
        nothing_remote_used,
        end_of_a_chain_not_used,
        sent_part_of_the_loss_not_used,
        one_of_two_calls_not_used,
        nested_call_not_used,
    ],
)
def test_fast_says_so_when_something_sent_is_not_used(pair: list[Agent], wasteful: Any) -> None:
    def program(run: Run) -> Any:
        start_leaves(run)
        return wasteful(run)

    compare(pair, program)  # right in SMART mode
    for way in (by_sync, by_async):
        run = DistributedRun(way)
        with dist_autograd.context() as run.context_id:
            roots = program(run)
            with pytest.raises(RuntimeError, match=r"(?i)smart"):
                run.backward(roots, mode="fast")
        with dist_autograd.context() as context_id:  # and the workers are none the worse
            x = doubles(3).requires_grad_()
            dist_autograd.backward(context_id, [rpc.rpc_sync("w1", torch.sum, args=(x,))])
            assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.ones_like(x))


@pytest.mark.parametrize("partial", [one_of_several_results_used, argument_not_used])
def test_fast_gives_right_gradients_or_an_error_when_a_part_of_a_message_is_used(
    pair: list[Agent], partial: Any
) -> None:
    """PyTorch takes a message as used when one of its tensors is; the others have no gradient."""

    def program(run: Run) -> Any:
        start_leaves(run)
        return partial(run)

    compare(pair, program)
    try:
        compare(pair, program, mode="fast")
    except RuntimeError as error:
        if "smart" not in str(error).lower():
            raise


@pytest.mark.parametrize("mode", ["", "FAST", "slow", None])
def test_unknown_mode(pair: list[Agent], mode: Any) -> None:
    x = doubles(3).requires_grad_()
    with dist_autograd.context() as context_id:
        with pytest.raises(ValueError, match="mode"):
            dist_autograd.backward(context_id, [x.sum()], mode=mode)
        dist_autograd.backward(context_id, [x.sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.ones_like(x))


def test_unused_parts_are_not_run(pair: list[Agent]) -> None:
    """Run neither their nodes nor their hooks, and give their leaves no gradient."""

    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1", b="w1")
        used, _ = run.call("w1", used_and_not, run, run["x"])
        return used.sum()

    compare(pair, program)


def used_and_not(run: Run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    used = run.hook(run.node(x * run["a"], "used"), "used")
    return used, run.hook(run.node(x * run["b"], "not used"), "not used")
