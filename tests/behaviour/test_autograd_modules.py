"""Distributed autograd with modules and with torch's ways to change how a graph is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from behaviour.autograd_helpers import (
    DistributedRun,
    Run,
    Way,
    compare,
    doubles,
    times,
    weights,
)
from behaviour.helpers import WAYS
from farcall import autograd as dist_autograd
from farcall.autograd import context_state
from farcall.autograd.autograd import Autograd
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.GELU(),
        torch.nn.Linear(8, 4),
    ).double()  # fmt: skip


def apply(run: Run, name: str, *inputs: Any) -> Any:
    return run[name](*inputs)


# Models that are split over workers.


def test_model_in_three_parts(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        for worker in ("w0", "w1", "w2"):
            run.module(worker, f"part of {worker}", mlp())
        h = run["part of w0"](doubles(5, 4))
        h = run.call("w1", apply, run, "part of w1", h)
        h = run.call("w2", apply, run, "part of w2", h + 1)
        return torch.nn.functional.mse_loss(h, doubles(5, 4, seed=2))

    compare(trio, program)


def test_recurrent_network_between_remote_layers(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.module("w1", "embedding", torch.nn.Embedding(10, 2, dtype=torch.float64))
        run.module("w0", "lstm", torch.nn.LSTM(2, 3, 4, dtype=torch.float64))
        run.module("w1", "decoder", torch.nn.Linear(3, 10, dtype=torch.float64))
        words = torch.arange(12).view(6, 2) % 10
        hidden: Any = None
        losses = []
        for part in words.split(3):
            embedded = run.call("w1", apply, run, "embedding", part)
            output, hidden = run["lstm"](embedded, hidden)
            scores = run.call("w1", apply, run, "decoder", output)
            losses.append(torch.nn.functional.cross_entropy(scores.flatten(0, 1), part.flatten()))
        return losses

    compare(pair, program)


def test_recurrent_network_on_the_callee_with_its_state_on_the_caller(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        run.module("w1", "gru", torch.nn.GRU(4, 3, 2, dtype=torch.float64))
        hidden = run.leaf("w0", "hidden", doubles(2, 3))
        total: Any = 0.0
        for step in range(4):
            output, hidden = run.call("w1", apply, run, "gru", run["x"][None] * step, hidden)
            total = total + output.sum()
        return total

    compare(pair, program)


def test_tied_weights(pair: list[Agent]) -> None:
    """Use one parameter under two names, in two modules of one worker."""

    def program(run: Run) -> Any:
        encoder = run.module("w1", "encoder", torch.nn.Embedding(6, 3, dtype=torch.float64))
        decoder = torch.nn.Linear(3, 6, bias=False, dtype=torch.float64)
        decoder.weight = encoder.weight
        run.modules["decoder"] = decoder
        h = run.call("w1", apply, run, "encoder", torch.tensor([1, 4, 1]))
        return run.call("w1", apply, run, "decoder", h.tanh()).logsumexp(1).sum()

    compare(pair, program)


def test_frozen_parameters(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        module = mlp()
        module[0].requires_grad_(False)
        run.modules["m"] = module
        for name, parameter in module[2:].named_parameters():
            run.leaf("w1", name, parameter)
        return run.call("w1", apply, run, "m", doubles(3, 4)).sum()

    compare(pair, program)


# Checkpoints: parts that run forward again in the backward pass.


def checkpointed(run: Run, reentrant: bool, x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        run.count("forward")
        return run["m"](x)

    return checkpoint(part, x, use_reentrant=reentrant).sin()


def test_checkpoint_in_a_remote_module(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        run.module("w1", "m", mlp())
        h = run.call("w1", checkpointed, run, False, run["x"].tanh())
        return run.call("w1", checkpointed, run, False, h).sum()

    compare(pair, program)


def checkpointed_sequence(run: Run, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(run["m"], 2, x, use_reentrant=False)


def test_checkpoint_of_a_sequence(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        run.module("w1", "m", mlp())
        return run.call("w1", checkpointed_sequence, run, run["x"].tanh()).sum()

    compare(pair, program)


def test_checkpoint_with_a_result_used_on_two_ways(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", a="w1")
        run.module("w0", "m", mlp())
        h = checkpointed(run, False, run["x"].tanh())
        return (run.call("w1", times, run, "a", h) * h).sum()

    compare(trio, program)


@pytest.mark.parametrize("way", WAYS)
def test_reentrant_checkpoint_is_right_or_an_error_that_says_so(
    pair: list[Agent], way: Any
) -> None:
    """Run `Tensor.backward` inside of the backward pass, which fills `.grad`."""

    def program(run: Run) -> Any:
        weights(run, x="w0")
        run.module("w1", "m", mlp())
        return run.call("w1", checkpointed, run, True, run["x"].tanh()).sum()

    run = DistributedRun(way)
    with dist_autograd.context() as run.context_id:
        root = program(run)
        with pytest.raises(RuntimeError, match="use_reentrant"):
            run.backward(root)
    assert all(leaf.grad is None for leaf in run.leaves.values())


# Autocast.


def linear(run: Run, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, run["w"])


def linear_in_autocast(run: Run, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(run, x)


def autocast_leaves(run: Run) -> None:
    run.leaf("w0", "x", doubles(3, 4).float())
    run.leaf("w0", "v", doubles(5, 4, seed=2).float())
    run.leaf("w1", "w", doubles(4, 4, seed=3).float())


def test_autocast_on_the_caller(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        autocast_leaves(run)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = run.call("w1", linear, run, run["x"].sin())
            assert h.dtype is torch.float32
            out = torch.nn.functional.linear(h, run["v"])
            assert out.dtype is torch.bfloat16
            half = run.call("w1", torch.sin, out)
            assert half.dtype is torch.bfloat16
        return half.float().sum()

    compare(pair, program)


def test_autocast_on_the_callee(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        autocast_leaves(run)
        h = run.call("w1", linear_in_autocast, run, run["x"])
        assert h.dtype is torch.bfloat16
        return torch.nn.functional.linear(h.float(), run["v"]).sum()

    compare(pair, program)


def test_autocast_on_both_around_backward(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        autocast_leaves(run)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = run.call("w1", linear_in_autocast, run, run["x"])
            run.backward(torch.nn.functional.linear(h, run["v"]).float().sum())

    compare(pair, program)


# Grad mode and detach.


def test_no_grad_around_a_call(pair: list[Agent]) -> None:
    """Link neither the result to the callee's graph, nor anything of the callee's to ours."""

    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        with torch.no_grad():
            frozen = run.call("w1", times, run, "w", run["x"]).detach()
        assert not frozen.requires_grad
        return (run.call("w1", times, run, "w", run["x"]) * frozen).sum()

    compare(pair, program)


@pytest.mark.parametrize("way", WAYS)
def test_result_of_a_call_under_no_grad_does_not_require_grad(pair: list[Agent], way: Any) -> None:
    run = DistributedRun(way)
    with dist_autograd.context() as run.context_id, torch.no_grad():
        weights(run, x="w0", w="w1")
        assert not run.call("w1", times, run, "w", run["x"]).requires_grad


def without_grad(run: Run, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return times(run, "w", x)


def test_no_grad_in_a_callee(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        frozen = run.call("w1", without_grad, run, run["x"])
        assert not frozen.requires_grad
        return (frozen * run["x"]).sum()

    compare(pair, program)


def nested_without_grad(run: Run, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        frozen = run.call("w0", times, run, "v", x).detach()
    return run.call("w0", times, run, "v", x) * frozen


def test_no_grad_around_a_nested_call(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", v="w0")
        return run.call("w1", nested_without_grad, run, run["x"]).sum()

    compare(pair, program)


def test_inference_mode_tensors_as_arguments(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, w="w1")
        with torch.inference_mode():
            plain = doubles(4) * 2
        return run.call("w1", times, run, "w", plain.clone()).sum()

    compare(pair, program)


def detaching(run: Run, x: torch.Tensor) -> torch.Tensor:
    return x.detach() * run["w"] + x.sin() * run["w"].detach()


def test_detach_in_a_callee(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        return run.call("w1", detaching, run, run["x"]).sum()

    compare(pair, program)


def test_detach_of_an_argument_and_of_a_result(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.call("w1", times, run, "w", run["x"].detach())
        g = run.call("w1", times, run, "w", run["x"]).detach()
        return (h * g * run["x"]).sum()

    compare(pair, program)


# In place.


def changed_in_place(run: Run, x: torch.Tensor) -> torch.Tensor:
    x = run.arrived(x)
    x.mul_(run["w"])
    x[1:].add_(x[0])
    return x


def test_arrived_tensor_changed_in_place(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run.call("w1", changed_in_place, run, run["x"].tanh())
        return (run.arrived(h).sin_() * run["x"]).sum()

    compare(pair, program)


def test_arrived_leaf_changed_in_place(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        return run.call("w1", changed_in_place, run, run["x"]).sum()

    compare(pair, program)


def several_changed(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = run.arrived(x), run.arrived(y)
    x.add_(y)
    y.mul_(x)
    return x.unbind()[0] + y.view(2, 2).t_()[0, 1]


def test_one_of_several_arrived_tensors_changed_in_place(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0", w="w1")
        return run.call("w1", several_changed, run, run["x"], run["y"])

    compare(pair, program)


def changed_after_sending(run: Run) -> Any:
    weights(run, x="w0", w="w1")
    h = run["x"].tanh().clone()
    r = run.call("w1", times, run, "w", run.arrived(h))
    h.mul_(3)
    return (r * h).sum()


def test_sent_tensor_changed_in_place_after_it_was_sent(pair: list[Agent]) -> None:
    """Give the gradient to the sent values, whatever the tensor holds afterwards."""
    compare(pair, changed_after_sending)


@pytest.mark.parametrize("copied", [4096, 0], ids=["copied", "recorded at once"])
def test_argument_changed_in_place_before_it_was_recorded(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    """Recording may come late: here, when the pass needs it."""

    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        h = run["x"].tanh().clone()
        future = run.call_async("w1", times, run, "w", run.arrived(h))
        h.mul_(3)
        return (future.wait() * h).sum()

    monkeypatch.setattr(Autograd, "record", lambda self, context, sent: None)
    monkeypatch.setattr(context_state, "COPIED_BYTES", copied)
    compare(pair, program)


def keep_in_list(run: Run, h: torch.Tensor) -> Any:
    run.kept = [h]
    return h


def keep_by_view(run: Run, h: torch.Tensor) -> Any:
    run.kept = [h[0]]
    return h


def keep_base(run: Run, h: torch.Tensor) -> Any:
    run.kept = [h]
    return h.view(2, 2)


def keep_container(run: Run, h: torch.Tensor) -> Any:
    run.kept = [h]
    return run.kept


def product(run: Run, x: torch.Tensor, keep: Callable[[Run, torch.Tensor], Any]) -> Any:
    return keep(run, run.arrived(x) * run["w"])


def change_kept(run: Run) -> None:
    for kept in run.kept:
        kept.mul_(3)


@pytest.mark.parametrize("copied", [4096, 0], ids=["copied", "recorded at once"])
@pytest.mark.parametrize("keep", [keep_in_list, keep_by_view, keep_base, keep_container])
def test_result_changed_in_place_before_it_was_recorded(
    pair: list[Agent],
    monkeypatch: pytest.MonkeyPatch,
    keep: Callable[[Run, torch.Tensor], Any],
    copied: int,
) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", w="w1")
        sent = run.call("w1", product, run, run["x"].detach(), keep)
        result = run.arrived(sent[0] if isinstance(sent, list) else sent) * run["x"].sum()
        run.call("w1", change_kept, run)
        return result.sum()

    monkeypatch.setattr(Autograd, "record", lambda self, context, sent: None)
    monkeypatch.setattr(context_state, "COPIED_BYTES", copied)
    compare(pair, program)


@pytest.mark.parametrize("call", WAYS)
def test_argument_of_a_caller_that_waits_is_recorded_before_it_goes_on(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, call: Way
) -> None:
    """Make no copy: whatever the caller changes, it changes afterwards."""
    recorded: list[int] = []
    record = Autograd.record

    def noted(self: Autograd, context: int, sent: int) -> None:
        if self.agent is pair[0]:
            recorded.append(sent)
        record(self, context, sent)

    monkeypatch.setattr(Autograd, "record", noted)
    with acting_as(pair[0]), dist_autograd.context():
        call("w1", torch.neg, (torch.ones(4, requires_grad=True),))
    assert len(recorded) == 1
