"""LBFGS over several owners equals LBFGS in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from behaviour.optimizing import Model, values_of
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.optim import DistributedOptimizer
from farcall.optim.owners import Owners
from farcall.runtime.agent import Agent

SHAPES = ((3,), (3, 2), (2,))


def first_layer(rref: rpc.RRef[Any], x: torch.Tensor) -> torch.Tensor:
    return x * rref.local_value().cos()


def second_layer(weight: rpc.RRef[Any], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight.local_value())


def third_layer(bias: rpc.RRef[Any], x: torch.Tensor) -> torch.Tensor:
    return x + bias.local_value()


class Fit:
    """A small model, its layers on two workers, and the same one here."""

    def __init__(self, seed: int = 3) -> None:
        self.model = Model(workers=("w1", "w2"), shapes=SHAPES, seed=seed)
        self.x, self.y = self.model.draw((8, 3)), self.model.draw((8, 2))
        self.evaluations = 0

    def remote_loss(self, context_id: int) -> torch.Tensor:
        self.evaluations += 1
        one, two, three = self.model.rrefs
        x = rpc.rpc_sync("w1", first_layer, args=(one, self.x))
        x = rpc.rpc_sync("w2", second_layer, args=(two, x))
        x = rpc.rpc_sync("w1", third_layer, args=(three, x))
        loss = torch.nn.functional.mse_loss(x, self.y)
        dist_autograd.backward(context_id, [loss])
        return loss

    def local_loss(self) -> torch.Tensor:
        one, two, three = self.model.here
        for parameter in self.model.here:
            parameter.grad = None
        x = torch.tanh((self.x * one.cos()) @ two) + three
        loss = torch.nn.functional.mse_loss(x, self.y)
        loss.backward()
        return loss


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.5, "max_iter": 4},
        {"line_search_fn": "strong_wolfe", "history_size": 5},
        {"line_search_fn": "strong_wolfe", "max_iter": 1},
    ],
)
def test_lbfgs_equals_itself_in_one_process(trio: list[Agent], options: dict[str, Any]) -> None:
    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, **options)
    local = optim.LBFGS(fit.model.here, **options)
    losses = []
    for _ in range(3):
        loss = optimizer.step(fit.remote_loss)
        expected = local.step(fit.local_loss)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=0)
        fit.model.check_equal()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    evaluations = local.state[fit.model.here[0]]["func_evals"]
    assert fit.evaluations == evaluations
    assert evaluations >= 3


def test_lbfgs_takes_the_values_that_parameters_have_when_it_steps(trio: list[Agent]) -> None:
    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, lr=0.1, max_iter=2)
    local = optim.LBFGS(fit.model.here, lr=0.1, max_iter=2)
    sgd = DistributedOptimizer(optim.SGD, fit.model.rrefs, lr=0.1)
    local_sgd = optim.SGD(fit.model.here, lr=0.1)
    for _ in range(2):
        optimizer.step(fit.remote_loss)
        local.step(fit.local_loss)
        fit.model.step_both(sgd, local_sgd)
        fit.model.check_equal()


def test_parameters_are_written_once_for_each_evaluation_but_the_first(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    call_each = Owners.call_each

    def note(self: Owners, what: str, method: str, args: Any) -> Any:
        written.append(method)
        return call_each(self, what, method, args)

    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, lr=0.5, max_iter=4)
    monkeypatch.setattr(Owners, "call_each", note)
    optimizer.step(fit.remote_loss)
    assert fit.evaluations == 4
    assert written == ["write"] * 4  # three before evaluations, and the result


def test_rate_of_lbfgs_may_be_scheduled(trio: list[Agent]) -> None:
    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, lr=0.5, max_iter=2)
    local = optim.LBFGS(fit.model.here, lr=0.5, max_iter=2)
    schedulers = [optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, local)]
    for _ in range(3):
        optimizer.step(fit.remote_loss)
        local.step(fit.local_loss)
        for scheduler in schedulers:
            scheduler.step()
    fit.model.check_equal()


def test_state_of_lbfgs_goes_to_one_process_and_back(trio: list[Agent]) -> None:
    fit = Fit()
    options = {"lr": 0.5, "max_iter": 3}
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, **options)
    optimizer.step(fit.remote_loss)
    local = optim.LBFGS(fit.model.here, **options)
    local.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for here, there in zip(fit.model.here, values_of(fit.model.rrefs), strict=True):
            here.copy_(there)
    optimizer.step(fit.remote_loss)
    local.step(fit.local_loss)
    fit.model.check_equal()
    again = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, lr=0.1, max_iter=1)
    again.load_state_dict(local.state_dict())
    assert again.param_groups[0]["lr"] == 0.5
    again.step(fit.remote_loss)
    local.step(fit.local_loss)
    fit.model.check_equal()


def test_lbfgs_clips_inside_of_the_closure(trio: list[Agent]) -> None:
    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, lr=0.5, max_iter=3)
    local = optim.LBFGS(fit.model.here, lr=0.5, max_iter=3)

    def remote_loss(context_id: int) -> torch.Tensor:
        loss = fit.remote_loss(context_id)
        optimizer.clip_grad_norm_(context_id, 0.01)
        return loss

    def local_loss() -> torch.Tensor:
        loss = fit.local_loss()
        torch.nn.utils.clip_grad_norm_(fit.model.here, 0.01)
        return loss

    optimizer.step(remote_loss)
    local.step(local_loss)
    fit.model.check_equal()


def test_closure_may_ask_for_the_state(trio: list[Agent]) -> None:
    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs, max_iter=2)
    seen = []

    def closure(context_id: int) -> torch.Tensor:
        seen.append(optimizer.state_dict()["state"][0]["func_evals"])
        return fit.remote_loss(context_id)

    optimizer.step(closure)
    assert seen == [0, 1]


def test_error_in_the_closure_comes_out_of_step(trio: list[Agent]) -> None:
    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs)

    def closure(context_id: int) -> torch.Tensor:
        raise KeyError("no loss today")

    with pytest.raises(KeyError, match="no loss today"):
        optimizer.step(closure)
    optimizer.step(fit.remote_loss)  # and the next works


def test_the_limits_of_lbfgs_are_said(trio: list[Agent]) -> None:
    fit = Fit()
    optimizer = DistributedOptimizer(optim.LBFGS, fit.model.rrefs)
    with dist_autograd.context() as context_id:
        fit.remote_loss(context_id)
        with pytest.raises(TypeError, match="give step a closure"):
            optimizer.step(context_id)
    uses: list[Callable[[], Any]] = [
        lambda: optimizer.add_param_group({"params": fit.model.rrefs[:1]}),
        optimizer.local_state_dict,
        lambda: optimizer.load_local_state_dict(optimizer.state_dict()),
        optimizer.initialize_state,
        lambda: rpc.rpc_sync("w1", repr, args=(optimizer,)),
    ]
    for refused in uses:
        with pytest.raises(TypeError, match=r"LBFGS (has one state|can't be passed)"):
            refused()
    two = [{"params": fit.model.rrefs[:1]}, {"params": fit.model.rrefs[1:]}]
    with pytest.raises(ValueError, match="LBFGS doesn't support per-parameter options"):
        DistributedOptimizer(optim.LBFGS, two)
    with pytest.raises(ValueError, match="LBFGS has no hogwild mode"):
        DistributedOptimizer(optim.LBFGS, fit.model.rrefs, hogwild=True)
    optimizer.step(fit.remote_loss)
    smaller = DistributedOptimizer(optim.LBFGS, fit.model.rrefs[:2])
    with pytest.raises(ValueError, match="group 0 has 3 parameters, that of this optimizer 2"):
        smaller.load_state_dict(optimizer.state_dict())
    other = Model(shapes=((5,), (3, 2), (2,)))
    with pytest.raises(ValueError, match="it has 11 elements, the parameters of this optimizer 13"):
        DistributedOptimizer(optim.LBFGS, other.rrefs).load_state_dict(optimizer.state_dict())
