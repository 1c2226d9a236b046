"""Parameters on their owner: found from references, their gradients clipped, their values moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from farcall.autograd import get_gradients
from farcall.optim.groups import LocalGroup
from farcall.optim.locks import ParameterLocks
from farcall.optim.owners import note
from farcall.torch_internals import values

Tensor = torch.Tensor


class Norms(NamedTuple):
    """Norms of gradients, one for each parameter that has one.

    Attributes:
        numbers: of these parameters.
        values: of shape (len(numbers),), on the CPU.
    """

    numbers: list[int]
    values: Tensor


class Parameters:
    """Some parameters of an optimizer, on their owner. Thread-safe.

    Attributes:
        tensors: the parameters.
        numbers: theirs, counted over all owners in the order given.
        locks: held while they are updated.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []
        self.locks = ParameterLocks(())
        self._accumulators: list[Tensor] = []

    def find(self, group: LocalGroup) -> list[Tensor]:
        """Return the parameters of a group to be added; wait for those that are being made.

        Raises:
            TypeError, ValueError: one is no parameter, or is there already.
            BaseException: what the function that was to make one raised.
        """
        known = dict(zip(self.tensors, self.numbers, strict=True))
        found = []
        for number, rref in zip(group.numbers, group.params, strict=True):
            try:
                value = rref.local_value()
            except BaseException as error:
                note(error, f"while making parameter {number} of the optimizer")
                raise
            _check(value, number)
            if value in known:
                raise ValueError(
                    f"parameter {number} is the same tensor as parameter {known[value]}"
                )
            known[value] = number
            found.append(value)
        return found

    def extend(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Add parameters."""
        self.locks.add(tensors)
        self.tensors += tensors
        self.numbers += numbers
        self._accumulators += [_holder(tensor) for tensor in tensors]

    # Clipping. Gradients belong to the context: all of its users see a change.

    def norms(self, context_id: int, norm_type: float) -> Norms | None:
        """Return the norms of the gradients; None if no parameter has one."""
        gradients = get_gradients(context_id)
        found = [
            (number, _values(gradients[tensor]))
            for number, tensor in zip(self.numbers, self.tensors, strict=True)
            if tensor in gradients
        ]
        if not found:
            return None
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(values, norm_type) for _, values in found]
            values = torch.stack([norm.cpu() for norm in norms])
        return Norms([number for number, _ in found], values)

    def scale(self, context_id: int, factor: Tensor) -> None:
        """Multiply the gradients with a scalar, in place."""
        with torch.no_grad():
            for gradient in self._gradients(context_id):
                gradient.mul_(factor.to(gradient.device))

    def clamp(self, context_id: int, limit: float) -> None:
        """Limit the elements of the gradients to [-limit, limit], in place."""
        with torch.no_grad():
            for gradient in self._gradients(context_id):
                if gradient.layout is torch.strided:
                    gradient.clamp_(-limit, limit)
                    continue
                # Elements that occur twice are added up first.
                whole = gradient.coalesce()
                values(whole)().clamp_(-limit, limit)
                gradient.copy_(whole)

    def _gradients(self, context_id: int) -> list[Tensor]:
        gradients = get_gradients(context_id)
        return [gradients[tensor] for tensor in self.tensors if tensor in gradients]

    # Values, for an optimizer that works elsewhere.

    def read(self) -> list[Tensor]:
        """Copies of the parameters, on the CPU."""
        with self.locks.held():
            return [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]

    def write(self, values: Sequence[Tensor]) -> None:
        """Set the parameters."""
        with self.locks.held(), torch.no_grad():
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.detach().copy_(value)

    def read_gradients(self, context_id: int) -> list[Tensor | None]:
        """Return the gradients that a context has for them, on the CPU."""
        gradients = get_gradients(context_id)
        found = [gradients.get(tensor) for tensor in self.tensors]
        return [None if gradient is None else gradient.detach().cpu() for gradient in found]


def _holder(parameter: Tensor) -> Tensor:
    """Return a tensor whose graph keeps torch's accumulator of a parameter, but no memory of it.

    Else torch makes one for each use, under a mutex of the parameter and waiting for the
    GIL meanwhile; a thread that has the GIL and wants the mutex, to index the parameter or to apply
    an `autograd.Function` to it, waits forever then (torch 2.13). An edge is not enough: torch
    needs the GIL, too, for an accumulator that only Python refers to.
    """
    if parameter.layout is not torch.strided:
        return parameter
    with torch.enable_grad():
        return parameter.as_strided((0,), (1,)).clone()


def _check(value: Any, number: int) -> None:
    which = f"parameter {number}"
    if isinstance(value, torch.nn.Module):
        raise TypeError(
            f"{which} is a reference to a {type(value).__name__}, not to a parameter: give a "
            "reference to each of its parameters(), made with rpc.RRef on its worker"
        )
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{which} is a reference to a {type(value).__name__}, not to a parameter: an optimizer "
            "can only optimize tensors"
        )
    if not value.is_leaf:
        raise ValueError(
            f"{which} is not a leaf: it was computed from other tensors, by {value.grad_fn}. An "
            "optimizer can only optimize leaf tensors"
        )


def _values(gradient: Tensor) -> Tensor:
    """Return a tensor with the norm of a gradient."""
    return gradient if gradient.layout is torch.strided else values(gradient.coalesce())()
