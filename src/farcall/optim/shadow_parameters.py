"""An optimizer of torch that works on parameters without touching their `.grad`.

It is given shadows: tensors over the same memory as the parameters, with gradients of their own.
So a step sees the gradients of one context only, whatever else goes on with the parameters: other
optimizers of the same parameters, local backward passes, or other steps of this optimizer, each on
shadows of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from farcall.optim.groups import RESERVED, Options
from farcall.optim.stepping import take_step

Tensor = torch.Tensor


class ShadowParameters:
    """Shadows of some parameters, and the optimizer that updates through them.

    Not thread-safe: for one step at a time.

    Args:
        parameters: leaves, in the order of the groups. The list is the caller's, and may grow.
        optimizer: over `tensors`.
        tensors: see `shadow_of`.
        unnoticed: see `shadow_of`.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        tensors: list[Tensor],
        unnoticed: bool,
    ) -> None:
        self.optimizer = optimizer
        self.tensors = tensors
        self._parameters = parameters
        self._unnoticed = unnoticed

    def step(self, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
        """Make one step of the optimizer, given the gradients of parameters."""
        self._follow()
        try:
            for parameter, tensor in zip(self._parameters, self.tensors, strict=True):
                tensor.grad = gradient_of(parameter)
            take_step(self.optimizer)
        finally:
            for tensor in self.tensors:
                tensor.grad = None

    def _follow(self) -> None:
        """Parameters may have moved: `parameter.data = ...`, as in `module.to(...)`."""
        for index, parameter in enumerate(self._parameters):
            old = self.tensors[index]
            if old.is_set_to(parameter):
                continue
            new = self.tensors[index] = shadow_of(parameter, self._unnoticed)
            if old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)
            for group in self.optimizer.param_groups:
                # In place: LBFGS and others keep the list.
                group["params"][:] = [new if p is old else p for p in group["params"]]

    def twin(self) -> ShadowParameters:
        """Return the same optimizer on other shadows, for a step that goes on at the same time.

        Its state is that of this one, the very same objects; see `refresh`.
        """
        optimizer = object.__new__(type(self.optimizer))
        optimizer.__dict__.update(self.optimizer.__dict__)
        tensors = [shadow_of(parameter, self._unnoticed) for parameter in self._parameters]
        of = dict(zip(self.tensors, tensors, strict=True))
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [
            {**group, "params": [of[tensor] for tensor in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return ShadowParameters(tuple(self._parameters), optimizer, tensors, self._unnoticed)

    def refresh(self, original: ShadowParameters) -> list[Options]:
        """Make a twin's state and hyperparameters those of the original; gives the latter."""
        # The original may be given more groups meanwhile: the earlier ones stay where they are.
        state = original.optimizer.state
        for tensor, other in zip(self.tensors, original.tensors, strict=False):
            self.optimizer.state[tensor] = state[other]
        given = []
        for group, other_group in zip(
            self.optimizer.param_groups, original.optimizer.param_groups, strict=False
        ):
            options = {k: v for k, v in other_group.items() if k not in RESERVED}
            group.update(options)
            given.append(options)
        return given

    def give_back(self, original: ShadowParameters, given: Sequence[Options]) -> None:
        """Hand the hyperparameters that the twin's step itself wrote to the original."""
        for options, group, other in zip(
            given, self.optimizer.param_groups, original.optimizer.param_groups, strict=False
        ):
            for name, value in group.items():
                if name not in RESERVED and options.get(name, other) is not value:
                    other[name] = value


def shadow_of(parameter: Tensor, unnoticed: bool) -> Tensor:
    """Return a tensor over the same memory with a gradient of its own.

    Args:
        unnoticed: whether autograd shall not know that an update of the shadow changes the
            parameter. Else a backward pass that needs the value from before raises torch's "has
            been modified by an inplace operation".
    """
    tensor = parameter.data if unnoticed else parameter.detach()
    tensor.requires_grad_(parameter.requires_grad)
    # Marks that some optimizers look for, such as `is_embedding`.
    tensor.__dict__.update(vars(parameter))
    return tensor
