"""Wrong uses of a distributed optimizer are reported, with the worker's name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from behaviour.helpers import wait_until
from behaviour.optimizing import (
    Model,
    make_gradients,
    make_parameter,
    take_step,
    values_of,
)
from farcall import autograd as dist_autograd
from farcall import errors, rpc
from farcall.errors import without_address
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent
from farcall.runtime.current import current_agent


def notes_of(error: BaseException) -> str:
    return "\n".join(without_address(getattr(error, "__notes__", [])))


def parameter_on(worker: str, *shape: int) -> rpc.RRef[Any]:
    return rpc.remote(worker, make_parameter, args=(torch.zeros(shape),))


# Construction.


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("SGD", "such as torch.optim.SGD, not a str"),
        (torch.nn.Linear, "such as torch.optim.SGD, not Linear"),
        (optim.SGD([torch.zeros(1)]), "such as torch.optim.SGD, not a SGD"),
        (optim.lr_scheduler.StepLR, "such as torch.optim.SGD, not StepLR"),
        (DistributedOptimizer, "such as torch.optim.SGD, not DistributedOptimizer"),
        (optim.Optimizer, "the base of all optimizers"),
        (None, "not a NoneType"),
    ],
)
def test_optimizer_class_must_be_one(pair: list[Agent], given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        DistributedOptimizer(given, [parameter_on("w1", 2)])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda r: [], ValueError, "optimizer got an empty parameter list"),
        (lambda r: iter(()), ValueError, "optimizer got an empty parameter list"),
        (lambda r: [{"params": []}], ValueError, "optimizer got an empty parameter list"),
        (lambda r: r, TypeError, "params_rref must be a list of RRefs .* not RRef"),
        (lambda r: {r}, TypeError, "params_rref must be a list .* not a set, whose order changes"),
        (lambda r: {"params": [r]}, TypeError, "params_rref must be a list .*, not dict"),
        (lambda r: 3, TypeError, "params_rref must be a list .*, not int"),
        (lambda r: [r, torch.zeros(1)], TypeError, r"params_rref\[1\] must be an RRef .* Tensor"),
        (
            lambda r: [torch.nn.Parameter(torch.zeros(1))],
            TypeError,
            r"params_rref\[0\] must be an RRef to a parameter, not Parameter: make one on the "
            r"worker where the parameter lives, with rpc.RRef\(parameter\)",
        ),
        (lambda r: [{"params": [r]}, r], TypeError, r"params_rref\[1\] must be a dict"),
        (lambda r: [{"lr": 0.1}], TypeError, r"params_rref\[0\] is a .* without 'params'"),
        (lambda r: [{"params": {r}}], TypeError, r"params_rref\[0\]\['params'\] must be .* a set"),
        (lambda r: [{"params": [1]}], TypeError, r"params_rref\[0\]\['params'\]\[0\] must be"),
        (lambda r: [("a", r), r], ValueError, "either all parameters have names, or none"),
        (lambda r: [r, r], ValueError, "parameter 1 is the same tensor as parameter 0"),
        (
            lambda r: [{"params": [r]}, {"params": [r]}],
            ValueError,
            "parameter 1 is the same tensor as parameter 0",
        ),
    ],
)
def test_parameters_must_be_references(
    pair: list[Agent], make: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        DistributedOptimizer(optim.SGD, make(parameter_on("w1", 2)), lr=0.1)


def again(rref: rpc.RRef[Any]) -> rpc.RRef[Any]:
    return rpc.RRef(rref.local_value())


def test_two_references_to_one_parameter_are_found_out(pair: list[Agent]) -> None:
    one = parameter_on("w1", 2)
    other = rpc.rpc_sync("w1", again, args=(one,))
    with pytest.raises(ValueError, match="parameter 2 is the same tensor as parameter 0"):
        DistributedOptimizer(optim.SGD, [one, parameter_on("w0", 1), other])
    optimizer = DistributedOptimizer(optim.SGD, [parameter_on("w1", 2), one])
    with pytest.raises(ValueError, match="parameter 2 is the same tensor as parameter 1"):
        optimizer.add_param_group({"params": [other]})


def not_a_leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


def fail() -> None:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("function", "args", "error", "text"),
    [
        (torch.nn.Linear, (2, 2), TypeError, r"parameter 1 is .* Linear, .* of its parameters\(\)"),
        (dict, (), TypeError, "parameter 1 is a reference to a dict, not to a parameter"),
        (not_a_leaf, (), ValueError, "parameter 1 is not a leaf: .* by <MulBackward0"),
        (fail, (), KeyError, "no such layer"),
    ],
)
@pytest.mark.parametrize("kind", [optim.SGD, optim.LBFGS])
def test_references_must_be_to_parameters(
    pair: list[Agent],
    kind: Any,
    function: Any,
    args: Any,
    error: type[Exception],
    text: str,
) -> None:
    rrefs = [parameter_on("w0", 2), rpc.remote("w1", function, args=args)]
    for _ in range(2):
        with pytest.raises(error, match=text) as caught:
            DistributedOptimizer(kind, rrefs, lr=0.1)
        *made, where, others = notes_of(caught.value).split("\n")
        assert made == ["while making parameter 1 of the optimizer"] * (function is fail)
        assert "failed on worker 'w1'" in where
        assert others == "... but not on 'w0'"


def test_an_error_of_the_optimizer_class_is_raised_with_the_workers_name(
    trio: list[Agent],
) -> None:
    model = Model()
    with pytest.raises(ValueError, match="Invalid learning rate: -1") as caught:
        DistributedOptimizer(optim.SGD, model.rrefs, lr=-1)
    assert "making SGD failed on worker 'w1'" in notes_of(caught.value)
    assert "... and on worker 'w2': ValueError: Invalid learning rate: -1" in notes_of(caught.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentumm'"):
        DistributedOptimizer(optim.SGD, model.rrefs, momentumm=1)
    with pytest.raises(TypeError, match="can't be sent"):
        DistributedOptimizer(optim.SGD, model.rrefs, lr=(n for n in range(3)))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        DistributedOptimizer(optim.Muon, model.rrefs)


def test_group_that_can_not_be_added_is_added_nowhere(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs[:2], lr=0.1)
    local = optim.SGD(model.here[:2], lr=0.1)
    good, bad = parameter_on("w1", 2), rpc.remote("w2", dict)
    for params in ([good, bad], [bad, good], [good, good]):
        with pytest.raises((TypeError, ValueError), match=r"parameter [23]"):
            optimizer.add_param_group({"params": params})
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([good])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="either the parameters of all groups have names, or none"):
        optimizer.add_param_group({"params": [("good", good)]})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state_dict()["param_groups"]) == 1
    optimizer.add_param_group({"params": [good, *model.rrefs[2:]]})
    local.add_param_group({"params": [torch.zeros(2), *model.here[2:]]})
    model.step_both(optimizer, local)
    model.check_equal()
    state = optimizer.state_dict()
    assert state["param_groups"] == local.state_dict()["param_groups"]


# Steps.


def test_step_needs_an_open_context(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=0.1)
    before = values_of(model.rrefs)
    with dist_autograd.context() as ended:
        make_gradients(ended, model.rrefs, model.draw_gradients())
    uses: list[Callable[[int], Any]] = [
        optimizer.step,
        lambda context_id: optimizer.clip_grad_norm_(context_id, 1.0),
        lambda context_id: optimizer.clip_grad_value_(context_id, 1.0),
    ]
    for use in uses:
        for context_id in (ended, 12345):
            with pytest.raises(
                RuntimeError, match=f"Could not find autograd context with id: {context_id}"
            ) as caught:
                use(context_id)
            assert not notes_of(caught.value), "no owner was asked"
        with pytest.raises(TypeError, match="context id"):
            use("first")  # type: ignore[arg-type]
    for there, here in zip(values_of(model.rrefs), before, strict=True):
        torch.testing.assert_close(there, here)


def test_step_takes_a_context_or_a_closure(pair: list[Agent]) -> None:
    rref = parameter_on("w1", 2)
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=0.1)
    with pytest.raises(TypeError, match="either the id of an autograd context, or a closure"):
        optimizer.step()
    with pytest.raises(TypeError, match="either the id of an autograd context, or a closure"):
        optimizer.step(1, lambda context_id: None)
    for kind in (optim.SGD, optim.LBFGS):
        optimizer = DistributedOptimizer(kind, [rref], lr=0.1)
        with pytest.raises(TypeError, match="closure must take one argument, the id of the autog"):
            optimizer.step(lambda: None)  # type: ignore[arg-type,misc]
        with dist_autograd.context(), pytest.raises(RuntimeError, match="Already have an autograd"):
            optimizer.step(lambda context_id: None)


class Brittle(optim.SGD):
    """Can't step parameters of three elements."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(parameter.numel() == 3 for parameter in group["params"]):
                raise ArithmeticError("three is too many")
        return super().step(closure)


def test_error_of_a_step_names_the_worker_and_the_others_have_stepped(trio: list[Agent]) -> None:
    rrefs = [parameter_on("w1", 3), parameter_on("w2", 2)]
    optimizer = DistributedOptimizer(Brittle, rrefs, lr=1.0)
    gradients = [torch.ones(3), torch.ones(2)]
    optimizer.param_groups[0]["lr"] = 2.0
    for factor in (1, 2):
        with pytest.raises(ArithmeticError, match="three is too many") as caught:
            take_step(optimizer, rrefs, gradients)
        assert caught.value.remote_worker == "w1"  # type: ignore[attr-defined]
        assert notes_of(caught.value) == "step failed on worker 'w1'\n... but not on 'w2'"
        assert rrefs[0].to_here().tolist() == [0.0] * 3
        assert rrefs[1].to_here().tolist() == [-2.0 * factor] * 2


def test_hyperparameter_that_can_not_be_sent_is_named(pair: list[Agent]) -> None:
    rref = parameter_on("w1", 2)
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    optimizer.param_groups[0]["lock"] = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        take_step(optimizer, [rref], [torch.ones(2)])
    del optimizer.param_groups[0]["lock"]
    take_step(optimizer, [rref], [torch.ones(2)])
    assert rref.to_here().tolist() == [-1.0, -1.0]


# Owners that are gone.


def test_owner_that_died_is_named(start: Callable[..., list[Agent]]) -> None:
    agents = start(3)
    rrefs = [parameter_on("w1", 2), parameter_on("w2", 2)]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0)
    take_step(optimizer, rrefs, [torch.ones(2), torch.ones(2)])
    agents[1].close()
    wait_until(lambda: not any(peer.name == "w1" for peer in agents[0].directory.live()))
    with dist_autograd.context() as context_id:
        make_gradients(context_id, rrefs[1:], [torch.ones(2)])
        with pytest.raises(errors.PeerLost) as caught:
            optimizer.step(context_id)
        assert caught.value.worker == "w1"
        assert notes_of(caught.value) == "step failed on worker 'w1'\n... but not on 'w2'"
    assert rrefs[1].to_here().tolist() == [-2.0, -2.0]
    uses: list[Callable[[], Any]] = [
        optimizer.state_dict,
        lambda: DistributedOptimizer(optim.SGD, rrefs, lr=1.0),
        lambda: DistributedOptimizer(optim.LBFGS, rrefs, lr=1.0),
        lambda: optimizer.add_param_group({"params": [parameter_on("w2", 2), rrefs[0]]}),
    ]
    for use in uses:
        with pytest.raises(errors.PeerLost) as caught:
            use()
        assert caught.value.worker == "w1"
        assert "on worker 'w1'" in notes_of(caught.value)
    assert len(optimizer.param_groups) == 1


class Fatal(optim.SGD):
    """Its worker dies in the middle of a step."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].numel() == 3:
            current_agent().close(patience=0.0)
        return super().step(closure)


def test_owner_that_dies_during_a_step_is_named(start: Callable[..., list[Agent]]) -> None:
    start(3)
    rrefs = [parameter_on("w1", 3), parameter_on("w2", 2)]
    optimizer = DistributedOptimizer(Fatal, rrefs, lr=1.0)
    with pytest.raises(errors.PeerLost) as caught:
        take_step(optimizer, rrefs, [torch.ones(3), torch.ones(2)])
    assert caught.value.worker == "w1"
    assert rrefs[1].to_here().tolist() == [-1.0, -1.0]
