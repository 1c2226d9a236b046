"""Gradients are clipped by their norm over all owners."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from behaviour.optimizing import Model, context_gradient, make_gradients, make_parameter
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent


def gradients_of(model: Model, context_id: int) -> list[torch.Tensor]:
    return [
        rpc.rpc_sync(rref.owner(), context_gradient, args=(rref, context_id))
        for rref in model.rrefs
    ]


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_over_all_owners_is_clipped_as_in_one_process(
    trio: list[Agent], max_norm: float, norm_type: float
) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=1.0)
    local = optim.SGD(model.here, lr=1.0)
    gradients = model.draw_gradients()
    with dist_autograd.context() as context_id:
        make_gradients(context_id, model.rrefs, gradients)
        norm = optimizer.clip_grad_norm_(context_id, max_norm, norm_type)
        model.set_gradients(gradients)
        expected = clip_grad_norm_(model.here, max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=0, atol=0)
        for there, here in zip(gradients_of(model, context_id), model.here, strict=True):
            torch.testing.assert_close(there, here.grad, rtol=0, atol=0)
        optimizer.step(context_id)
    local.step()
    model.check_equal()


def test_parameters_without_gradient_do_not_count(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=1.0)
    with dist_autograd.context() as context_id:
        assert optimizer.clip_grad_norm_(context_id, 1.0) == 0.0
    gradients = model.draw_gradients(missing=(1, 2, 3))
    assert gradients[0] is not None
    with dist_autograd.context() as context_id:
        make_gradients(context_id, model.rrefs, gradients)
        norm = optimizer.clip_grad_norm_(context_id, 1.0)
    torch.testing.assert_close(norm, gradients[0].norm())


def test_elements_are_clipped_as_in_one_process(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=1.0)
    local = optim.SGD(model.here, lr=1.0)
    gradients = model.draw_gradients()
    with dist_autograd.context() as context_id:
        make_gradients(context_id, model.rrefs, gradients)
        optimizer.clip_grad_value_(context_id, 0.25)
        optimizer.step(context_id)
    model.set_gradients(gradients)
    clip_grad_value_(model.here, 0.25)
    local.step()
    model.check_equal()


def test_sparse_gradients_are_clipped_as_their_dense_form(trio: list[Agent]) -> None:
    model = Model(shapes=((6, 2), (5, 3)))
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=1.0)
    gradients = model.draw_sparse_gradients(rows=8)
    dense = [gradient.to_dense() for gradient in gradients if gradient is not None]
    for clip, clip_local in (
        (optimizer.clip_grad_norm_, clip_grad_norm_),
        (optimizer.clip_grad_value_, clip_grad_value_),
    ):
        with dist_autograd.context() as context_id:
            make_gradients(context_id, model.rrefs, gradients)
            norm = clip(context_id, 0.7)
            model.set_gradients(dense)
            expected: Any = clip_local(model.here, 0.7)
            if expected is not None:
                torch.testing.assert_close(norm, expected)
            for there, here in zip(gradients_of(model, context_id), model.here, strict=True):
                assert there.is_sparse
                torch.testing.assert_close(there.to_dense(), here.grad)


def test_norm_that_is_not_finite_is_an_error_if_asked_for(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=1.0)
    gradients = model.draw_gradients()
    assert gradients[1] is not None
    gradients[1][0] = math.nan
    with dist_autograd.context() as context_id:
        make_gradients(context_id, model.rrefs, gradients)
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            optimizer.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)
        torch.testing.assert_close(gradients_of(model, context_id)[0], gradients[0])
        norm = optimizer.clip_grad_norm_(context_id, 1.0)
        assert norm.isnan()
        assert gradients_of(model, context_id)[0].isnan().all()


def test_norm_type_may_be_a_text_as_in_torch(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, lr=1.0)
    gradients = model.draw_gradients()
    with dist_autograd.context() as context_id:
        make_gradients(context_id, model.rrefs, gradients)
        norm = optimizer.clip_grad_norm_(context_id, 1.0, "inf")  # type: ignore[arg-type]
        assert norm == max(g.abs().max() for g in gradients if g is not None)
        with pytest.raises(ValueError, match="could not convert string to float"):
            optimizer.clip_grad_norm_(context_id, "much")  # type: ignore[arg-type]


def test_clipping_is_seen_by_other_optimizers_of_the_context(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(2),))
    first = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    second = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    with dist_autograd.context() as context_id:
        make_gradients(context_id, [rref], [torch.tensor([3.0, 4.0])])
        assert first.clip_grad_norm_(context_id, 1.0) == 5.0
        second.step(context_id)
    torch.testing.assert_close(rref.to_here().detach(), torch.tensor([-0.6, -0.8]))


def test_gradient_of_a_sum_can_be_clipped(pair: list[Agent]) -> None:
    """Autograd gives one number for all of its elements."""
    rref = rpc.remote("w1", make_parameter, args=(torch.zeros(4),))
    optimizer = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", torch.sum, args=(rref.to_here(),))
        dist_autograd.backward(context_id, [loss])
        optimizer.clip_grad_norm_(context_id, 1.0)
        optimizer.step(context_id)
    torch.testing.assert_close(rref.to_here().detach(), torch.full((4,), -0.5))
