"""`RRef.backward`: from the owner and from elsewhere, with a context and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from behaviour.autograd_helpers import DistributedRun, Run, check_same, doubles, times, weights
from behaviour.helpers import echo
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


def loss_there(run: Run, x: torch.Tensor) -> torch.Tensor:
    return times(run, "w", x).sum()


def start_run() -> DistributedRun:
    run = DistributedRun()
    weights(run, x="w0", w="w1")
    return run


def check(pair: list[Agent], run: DistributedRun, passes: int = 1) -> None:
    check_same(run.gradient("x"), passes * run["w"].detach(), "gradient of x")
    with acting_as(pair[1]):
        check_same(run.gradient("w"), passes * run["x"].detach(), "gradient of w")
    assert run["x"].grad is None
    assert run["w"].grad is None


# With a context.


def test_of_a_reference_to_another_workers_value(pair: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        rref = rpc.remote("w1", loss_there, args=(run, run["x"]))
        rref.backward(run.context_id)
        check(pair, run)


def test_on_the_owner(pair: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", times, run, "w", run["x"])
        rpc.RRef(h.sum()).backward(run.context_id)
        check(pair, run)


def test_on_the_owner_by_keyword(pair: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        h = run.call("w1", times, run, "w", run["x"])
        rpc.RRef(h.sum()).backward(dist_autograd_ctx_id=run.context_id, retain_graph=False)
        check(pair, run)


@pytest.mark.parametrize("there", [True, False])
def test_twice_with_retain_graph(pair: list[Agent], there: bool) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        if there:
            rref = rpc.remote("w1", loss_there, args=(run, run["x"]))
        else:
            rref = rpc.RRef(run.call("w1", times, run, "w", run["x"]).sum())
        rref.backward(run.context_id, retain_graph=True)
        rref.backward(run.context_id)
        check(pair, run, passes=2)
        with pytest.raises(RuntimeError, match=r"second time|retain_graph"):
            rref.backward(run.context_id)


def test_from_a_third_worker(trio: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        rref = rpc.remote("w1", loss_there, args=(run, run["x"]))
        rpc.rpc_sync("w2", backward_of, args=(rref, run.context_id))
        check(trio, run)


def backward_of(rref: rpc.RRef[torch.Tensor], context_id: int) -> None:
    rref.backward(context_id)


def test_of_a_value_that_is_still_being_made(pair: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        for _ in range(20):
            rpc.remote("w1", loss_there, args=(run, run["x"])).backward(run.context_id)
        check(pair, run, passes=20)


def test_of_a_result_of_a_result(trio: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        h = rpc.remote("w1", times, args=(run, "w", run["x"]))
        rpc.remote("w2", total_of, args=(h,)).backward(run.context_id)
        check(trio, run)


def total_of(rref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here().sum()


# Without: `Tensor.backward` on the owner.


def test_without_a_context_on_the_owner_fills_grad(pair: list[Agent]) -> None:
    x = doubles(4).requires_grad_()
    rref = rpc.RRef((x**2).sum())
    rref.backward(retain_graph=True)
    assert x.grad is not None
    check_same(x.grad, 2 * x.detach(), "gradient")
    rref.backward()
    check_same(x.grad, 4 * x.detach(), "gradient of two passes")
    with pytest.raises(RuntimeError, match="second time"):
        rref.backward()


def test_without_a_context_in_a_callee_that_is_the_owner(pair: list[Agent]) -> None:
    run = start_run()
    rref = rpc.remote("w1", square_of_weight, args=(run,))
    rpc.rpc_sync("w1", backward_locally, args=(rref,))
    assert run["w"].grad is not None
    check_same(run["w"].grad, 2 * run["w"].detach(), "gradient")


def square_of_weight(run: Run) -> torch.Tensor:
    return (run["w"] ** 2).sum()


def backward_locally(rref: rpc.RRef[torch.Tensor]) -> None:
    rref.backward(-1)


def test_without_a_context_by_another_worker(pair: list[Agent]) -> None:
    run = start_run()
    rref = rpc.remote("w1", square_of_weight, args=(run,))
    message = "User RRefs require 'dist_autograd_ctx_id' to be specified"
    with pytest.raises(RuntimeError, match=message):
        rref.backward()
    with dist_autograd.context(), pytest.raises(RuntimeError, match=message):
        rref.backward(-1)
    assert run["w"].grad is None


# Values that have no gradient.

BAD_VALUES: dict[str, tuple[Any, str]] = {
    "no tensor": ("foo", r"RRef should contain a tensor for .backward\(\)"),
    "a list of tensors": (
        [torch.ones((), requires_grad=True)],
        r"RRef should contain a tensor for .backward\(\)",
    ),
}


@pytest.mark.parametrize("to", ["w0", "w1"])
@pytest.mark.parametrize("kind", BAD_VALUES)
def test_of_a_value_that_is_no_tensor(pair: list[Agent], kind: str, to: str) -> None:
    value, message = BAD_VALUES[kind]
    rref = rpc.remote(to, echo, args=(value,))
    with dist_autograd.context() as context_id, pytest.raises(RuntimeError, match=message):
        rref.backward(context_id)
    if to == "w0":
        with pytest.raises(RuntimeError, match=message):
            rref.backward()


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_of_a_tensor_that_is_no_root(pair: list[Agent], to: str) -> None:
    plain = rpc.remote(to, torch.zeros, args=(10,))
    wide = rpc.remote(to, two_of_its, args=(doubles(3).requires_grad_(),))
    with dist_autograd.context() as context_id:
        with pytest.raises(RuntimeError, match="requires_grad not set on"):
            plain.backward(context_id)
        with pytest.raises(RuntimeError, match="all roots need to be scalar"):
            wide.backward(context_id)


def two_of_its(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_of_a_tensor_that_is_no_root_without_a_context(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        rpc.RRef(torch.rand(10)).backward()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        rpc.RRef(torch.rand(10, requires_grad=True)).backward()


# Contexts that are none.


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_with_an_unknown_context(pair: list[Agent], to: str) -> None:
    rref = rpc.remote(to, loss_of, args=(doubles(3).requires_grad_(),))
    for context_id in (100, 0):
        message = f"Could not find autograd context with id: {context_id}"
        with pytest.raises(RuntimeError, match=message):
            rref.backward(context_id)


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


@pytest.mark.parametrize("to", ["w0", "w1"])
@pytest.mark.parametrize("context_id", [None, "1", 1.5])
def test_with_a_context_of_the_wrong_type(pair: list[Agent], to: str, context_id: Any) -> None:
    rref = rpc.remote(to, loss_of, args=(doubles(3).requires_grad_(),))
    with pytest.raises(TypeError, match="context"):
        rref.backward(context_id)


def test_after_the_function_failed(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", fail)
    with dist_autograd.context() as context_id, pytest.raises(LookupError, match="planted"):
        rref.backward(context_id)


def fail() -> None:
    raise LookupError("planted")


def test_of_a_reference_whose_owner_is_gone(pair: list[Agent]) -> None:
    run = start_run()
    with dist_autograd.context() as run.context_id:
        rref = rpc.remote("w1", loss_there, args=(run, run["x"]))
        rref.to_here()
        pair[1].close()
        with pytest.raises(rpc.PeerLost):
            rref.backward(run.context_id)
