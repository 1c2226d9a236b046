"""An optimizer that works where the handle is, on copies of all parameters: for LBFGS.

L-BFGS needs all gradients in one vector, and evaluates the model several times in a step. So the
copies are fetched from the owners before a step, written to them before each evaluation, and the
gradients fetched after it. The result is that of the same optimizer in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall.autograd import context
from farcall.optim.groups import Group, Options, by_owner, options_of
from farcall.optim.locks import holding
from farcall.optim.owners import Owners, call_inside, call_workers
from farcall.optim.part import Recipe, build_parameters
from farcall.optim.shards import StateDict, check_sizes, normalized, to_cpu

Closure = Callable[[int], Any]


class Central:
    """An optimizer over copies of parameters of other workers. Thread-safe.

    Args:
        recipe: of the optimizer.
        groups: of the handle.

    Raises:
        ValueError: the optimizer class does not take these groups.
    """

    def __init__(self, recipe: Recipe, groups: Sequence[Group]) -> None:
        what = f"finding the parameters of {recipe.name}"
        local = {owner: (own,) for owner, own in by_owner(groups).items()}
        self.owners = Owners(call_workers(what, build_parameters, local))
        self._name = recipe.name
        self._lock = threading.RLock()  # the closure may ask for the state
        self._owner_of = [rref.owner_name() for group in groups for rref in group["params"]]
        self._copies = self._fetch("fetching the parameters", "read")
        left = iter(self._copies)
        copies = [{**group, "params": [next(left) for _ in group["params"]]} for group in groups]
        self._optimizer = recipe.make(copies)
        self._is_written = False

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a DistributedOptimizer of {self._name} can't be passed to another worker: its state "
            "is where it was made"
        )

    @property
    def defaults(self) -> Options:
        """The optimizer's defaults."""
        return self._optimizer.defaults

    def options(self) -> dict[int, Options]:
        """Return the hyperparameters of the groups, by index."""
        return dict(enumerate(map(options_of, self._optimizer.param_groups)))

    def step_by(self, closure: Closure, groups: Sequence[Group]) -> Any:
        """Make one step; return the result of the closure's first evaluation.

        Args:
            groups: of the handle, whose hyperparameters are used.
        """
        with holding(self._lock):
            self._adopt(groups)
            with torch.no_grad():
                fetched = self._fetch("fetching the parameters", "read")
                for copy, value in zip(self._copies, fetched, strict=True):
                    copy.copy_(value)
            self._is_written = True
            result = self._optimizer.step(lambda: self._evaluate(closure))
            self._write()
            return result

    def _adopt(self, groups: Sequence[Group]) -> None:
        for mine, theirs in zip(self._optimizer.param_groups, groups, strict=True):
            mine.update(options_of(theirs))

    def _evaluate(self, closure: Closure) -> Any:
        if not self._is_written:
            self._write()
        self._is_written = False  # the optimizer changes the copies when this returns
        with context() as context_id:
            loss = closure(context_id)
            what = "fetching gradients"
            gradients = call_inside(context_id, self._fetch, what, "read_gradients", context_id)
        for copy, gradient in zip(self._copies, gradients, strict=True):
            copy.grad = gradient
        return loss

    def _fetch(self, what: str, method: str, *args: Any) -> list[Any]:
        """Fetch all owners' values for their parameters, in the order of the handle."""
        found = self.owners.call(what, method, *args)
        each = {owner: iter(items) for owner, items in found.items()}
        return [next(each[owner]) for owner in self._owner_of]

    def _write(self) -> None:
        values: dict[str, list[torch.Tensor]] = {owner: [] for owner in self.owners.parts}
        for owner, copy in zip(self._owner_of, self._copies, strict=True):
            values[owner].append(copy.detach())
        sent = {owner: (own,) for owner, own in values.items()}
        self.owners.call_each("writing the parameters", "write", sent)

    # State.

    def state_dict(self, groups: Sequence[Group]) -> StateDict:
        """Return a copy of the state; `groups` are those of the handle."""
        with holding(self._lock):
            self._adopt(groups)
            copy: StateDict = to_cpu(self._optimizer.state_dict(), copy=True)
            return copy

    def load_state_dict(self, state_dict: Any, groups: Sequence[Group]) -> dict[int, Options]:
        """Take over a state: the hyperparameters now.

        Raises:
            TypeError, ValueError: it does not fit. Nothing is loaded then.
        """
        # A copy: torch would go on with the very tensors that the state has.
        loaded = to_cpu(normalized(state_dict), copy=True)
        check_sizes(loaded["param_groups"], groups)
        elements = sum(copy.numel() for copy in self._copies)
        for state in loaded["state"].values():
            direction = state.get("d")
            if isinstance(direction, torch.Tensor) and direction.numel() != elements:
                raise ValueError(
                    f"state_dict is that of another model: it has {direction.numel()} elements, "
                    f"the parameters of this optimizer {elements}"
                )
        with holding(self._lock):
            self._optimizer.load_state_dict(loaded)
        return self.options()
