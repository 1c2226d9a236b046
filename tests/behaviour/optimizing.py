"""Common parts of the optimizer's tests: parameters on workers, and gradients to measure.

`Model` keeps parameters on several workers and the same ones here, for an optimizer of torch's own
to work on: both must end up equal, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.optim import DistributedOptimizer

Gradients = Sequence[torch.Tensor | None]

SHAPES = ((3, 2), (4,), (), (2, 3))


def make_parameter(values: torch.Tensor, requires_grad: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.clone(), requires_grad)


def weighted_sum(parameter: rpc.RRef[Any], weights: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient by the parameter is `weights`, exactly."""
    value = parameter.local_value()
    if weights.is_sparse:
        rows = weights._indices()[0]
        found = torch.nn.functional.embedding(rows, value, sparse=True)
        return (found * weights._values()).sum()
    return (value * weights).sum()


def loss_with_gradients(rrefs: Sequence[rpc.RRef[Any]], gradients: Gradients) -> torch.Tensor:
    """Return, inside a context, a loss with these gradients; None leaves a parameter out."""
    terms = [
        rpc.rpc_async(rref.owner(), weighted_sum, args=(rref, gradient))
        for rref, gradient in zip(rrefs, gradients, strict=True)
        if gradient is not None
    ]
    return torch.stack([term.wait() for term in terms]).sum()


def make_gradients(context_id: int, rrefs: Sequence[rpc.RRef[Any]], gradients: Gradients) -> None:
    """Give a context these gradients."""
    dist_autograd.backward(context_id, [loss_with_gradients(rrefs, gradients)])


def take_step(
    optimizer: DistributedOptimizer, rrefs: Sequence[rpc.RRef[Any]], gradients: Gradients
) -> None:
    with dist_autograd.context() as context_id:
        make_gradients(context_id, rrefs, gradients)
        optimizer.step(context_id)


def values_of(rrefs: Sequence[rpc.RRef[Any]]) -> list[torch.Tensor]:
    return [rref.to_here().detach() for rref in rrefs]


def gradient_attribute(parameter: rpc.RRef[Any]) -> torch.Tensor | None:
    """Handler: `.grad` of a parameter of this worker."""
    grad: torch.Tensor | None = parameter.local_value().grad
    return grad


def context_gradient(parameter: rpc.RRef[Any], context_id: int) -> torch.Tensor:
    """Handler: the gradient that a context has for a parameter of this worker."""
    return dist_autograd.get_gradients(context_id)[parameter.local_value()]


class Model:
    """Parameters on workers, turn and turn about, and equal ones here."""

    def __init__(
        self,
        workers: Sequence[str] = ("w1", "w2"),
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        seed: int = 0,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.here = [torch.nn.Parameter(self.draw(shape)) for shape in shapes]
        self.rrefs = [
            rpc.remote(workers[index % len(workers)], make_parameter, args=(parameter.detach(),))
            for index, parameter in enumerate(self.here)
        ]

    def draw(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.random)

    def draw_gradients(self, missing: Sequence[int] = ()) -> list[torch.Tensor | None]:
        drawn: list[torch.Tensor | None] = [self.draw(p.shape) for p in self.here]
        for index in missing:
            drawn[index] = None
        return drawn

    def draw_sparse_gradients(self, rows: int = 3) -> list[torch.Tensor | None]:
        """Draw gradients of parameters with two dimensions; some rows occur twice."""
        drawn: list[torch.Tensor | None] = []
        for parameter in self.here:
            count, width = parameter.shape
            indices = torch.randint(count, (1, rows), generator=self.random)
            drawn.append(
                torch.sparse_coo_tensor(
                    indices, self.draw((rows, width)), (count, width), check_invariants=True
                )
            )
        return drawn

    def set_gradients(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self.here, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def step_both(
        self,
        optimizer: DistributedOptimizer,
        local: torch.optim.Optimizer,
        gradients: Gradients | None = None,
    ) -> None:
        gradients = self.draw_gradients() if gradients is None else gradients
        take_step(optimizer, self.rrefs, gradients)
        self.set_gradients(gradients)
        local.step()

    def check_equal(self) -> None:
        for there, here in zip(values_of(self.rrefs), self.here, strict=True):
            torch.testing.assert_close(there, here.detach(), rtol=0, atol=0)
