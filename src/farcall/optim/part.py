"""The part of an optimizer on an owner: its parameters, and torch's optimizer over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from farcall.autograd import context_with_id
from farcall.optim.groups import Change, Group, LocalGroup, Options, apply, options_of
from farcall.optim.parameters import Norms, Parameters
from farcall.optim.shadow_parameters import ShadowParameters, shadow_of
from farcall.optim.shards import Outline, Shard, initial_state, mismatches, to_cpu
from farcall.rref import RRef
from farcall.runtime.calls.call_names import own_handler

Tensor = torch.Tensor


class Recipe(NamedTuple):
    """The recipe of an optimizer: `kind(groups, *args, **kwargs)`."""

    kind: type[torch.optim.Optimizer]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kind.__name__

    def make(self, groups: list[Group]) -> torch.optim.Optimizer:
        make: Any = self.kind
        optimizer: torch.optim.Optimizer = make(groups, *self.args, **self.kwargs)
        return optimizer


class Part(Parameters):
    """One owner's part of a distributed optimizer. Thread-safe.

    Args:
        recipe: of the optimizer.
        groups: those with parameters here, at least one.
        hogwild: see `DistributedOptimizer`.
    """

    def __init__(self, recipe: Recipe, groups: Sequence[LocalGroup], hogwild: bool) -> None:
        super().__init__()
        self._recipe = recipe
        self._hogwild = hogwild
        self._groups = [group.group for group in groups]
        tensors: list[Tensor] = []
        described = []
        for group in groups:
            found = self.find(group)
            self.extend(found, group.numbers)
            described.append(self._describe(group, found, tensors))
        optimizer = recipe.make(described)
        self._main = ShadowParameters(self.tensors, optimizer, tensors, hogwild)
        # Twins of `_main` that wait for steps, and the parameters whose state is complete.
        self._twins: deque[ShadowParameters] = deque()
        self._warm: set[Tensor] = set()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._main.optimizer

    def _describe(self, group: LocalGroup, found: list[Tensor], tensors: list[Tensor]) -> Group:
        """Return the group for torch, over shadows, which are added to `tensors`."""
        fresh: list[Any] = [shadow_of(parameter, self._hogwild) for parameter in found]
        tensors += fresh
        params = fresh if group.names is None else list(zip(group.names, fresh, strict=True))
        return {**group.options, "params": params}

    def options(self) -> dict[int, Options]:
        """Return the hyperparameters of the groups, by their indices."""
        with self.locks.held():
            return self._options()

    def _options(self) -> dict[int, Options]:
        groups = zip(self._groups, self._optimizer.param_groups, strict=True)
        return {index: options_of(group) for index, group in groups}

    def defaults(self) -> Options:
        """Return the optimizer's defaults."""
        return self._optimizer.defaults

    # Steps.

    def step(self, context_id: int, changes: Mapping[int, Change] | None) -> None:
        """Update the parameters by the gradients of a context, after changing hyperparameters."""
        gradient_of = context_with_id(context_id).gradient_of
        if self._hogwild and self._warm.issuperset(self._used(gradient_of)):
            if changes:
                with self.locks.held():
                    self._change(changes)
            self._step_freely(gradient_of)
            return
        with self.locks.held():
            if changes:
                self._change(changes)
            self._main.step(gradient_of)
            if self._hogwild:
                self._warm.update(self._used(gradient_of))

    def _used(self, gradient_of: Callable[[Tensor], Tensor | None]) -> list[Tensor]:
        return [tensor for tensor in self.tensors if gradient_of(tensor) is not None]

    def _change(self, changes: Mapping[int, Change]) -> None:
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            if index in changes:
                apply(group, changes[index])

    def _step_freely(self, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
        """Make a step that goes on while others do.

        Only when the parameters' state is complete: two first steps at once would both begin to
        fill it, and one would find it half made.
        """
        twins = self._twins
        try:
            twin = twins.pop()
        except IndexError:
            with self.locks.held():
                twin = self._main.twin()
        given = twin.refresh(self._main)
        twin.step(gradient_of)
        twin.give_back(self._main, given)
        twins.append(twin)

    # Groups that come later.

    def add_group(self, group: LocalGroup) -> Options:
        """Add a group; gives its hyperparameters."""
        self._check_is_new(group.group)
        found = self.find(group)
        with self.locks.held():
            self._check_is_new(group.group)
            tensors: list[Tensor] = []
            self._optimizer.add_param_group(self._describe(group, found, tensors))
            self._main.tensors += tensors
            self._groups.append(group.group)
            self._twins = deque()
            self.extend(found, group.numbers)
            return options_of(self._optimizer.param_groups[-1])

    def _check_is_new(self, index: int) -> None:
        if index in self._groups:
            raise RuntimeError(
                f"parameter group {index} was added already, through another handle of this "
                "optimizer"
            )

    def remove_group(self, index: int) -> None:
        """Undo `add_group`, for another worker could not add its part of the group."""
        with self.locks.held():
            if self._groups[-1] != index:
                return
            removed = len(self._optimizer.param_groups.pop()["params"])
            for tensor in self._main.tensors[-removed:]:
                self._optimizer.state.pop(tensor, None)
            for items in (self._main.tensors, self.tensors, self.numbers, self._accumulators):
                del items[-removed:]
            self._groups.pop()
            self._twins = deque()

    # State.

    def state(self) -> Shard:
        """Return a copy of the state, on the CPU."""
        with self.locks.held():
            saved = self._optimizer.state_dict()
            return Shard.of(to_cpu(saved, copy=True), self.numbers, self._groups)

    def check(self, outline: Outline) -> list[str]:
        """Return the faults of a state that is to be loaded, in words."""
        with self.locks.held():
            shapes = {n: tuple(t.shape) for n, t in zip(self.numbers, self.tensors, strict=True)}
            held = Shard.of(self._optimizer.state_dict(), self.numbers, self._groups)
            return mismatches(outline, self._optimizer, shapes, held)

    def load(self, shard: Shard) -> dict[int, Options]:
        """Take over the state; gives the hyperparameters."""
        with self.locks.held():
            self._optimizer.load_state_dict(self._as_state_dict(shard))
            self._warm = set()
            return self._options()

    def _as_state_dict(self, shard: Shard) -> dict[str, Any]:
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        return shard.as_state_dict(self.numbers, self._groups, sizes)

    def initialize(self) -> None:
        """Give all parameters without state that which a first step makes."""
        with self.locks.held():
            made = initial_state(self._recipe.make, self._optimizer, self.numbers, self._groups)
            held = Shard.of(self._optimizer.state_dict(), self.numbers, self._groups)
            made.parameters.update(held.parameters)
            self._optimizer.load_state_dict(self._as_state_dict(made))


class Built(NamedTuple):
    """A part that was made on an owner."""

    part: RRef[Part]
    defaults: Options
    options: dict[int, Options]


@own_handler("the making of an optimizer")
def build(recipe: Recipe, groups: Sequence[LocalGroup], hogwild: bool) -> Built:
    """Handler: make this worker's part of an optimizer."""
    part = Part(recipe, groups, hogwild)
    return Built(RRef(part), part.defaults(), part.options())


@own_handler("the making of an optimizer")
def build_parameters(groups: Sequence[LocalGroup]) -> RRef[Parameters]:
    """Handler: make this worker's part of an optimizer that works elsewhere."""
    parameters = Parameters()
    for group in groups:
        parameters.extend(parameters.find(group), group.numbers)
    return RRef(parameters)


_METHODS = (
    *(Part.step, Part.options, Part.add_group, Part.remove_group),
    *(Part.state, Part.check, Part.load, Part.initialize),
    *(Part.norms, Part.scale, Part.clamp, Part.read, Part.write, Part.read_gradients),
)
# For workers with a policy, see `Only`: owners of parameters allow the functions, beside the class
# of the optimizer; owners and users of the optimizer allow the types.
FUNCTIONS = (build, build_parameters, *_METHODS)
TYPES = (Recipe, LocalGroup, Change, Built, Norms, Shard, Outline)
