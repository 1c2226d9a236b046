"""The state of an optimizer in pieces: what each owner holds, and the `state_dict` of them all.

The `state_dict` is torch's own, as a local optimizer over all parameters in the order given would
make it. A shard is the part of it that one owner holds, under the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from farcall.optim.groups import Group, Options, options_of

StateDict = dict[str, Any]
Shape = tuple[int, ...]

STANDARD = ("state", "param_groups")


class Shard(NamedTuple):
    """One owner's part of the state.

    Attributes:
        parameters: number of a parameter -> its state.
        others: entries of "state" that belong to no parameter.
        groups: index of a group -> its hyperparameters.
        extra: entries beside "state" and "param_groups", which an optimizer class may add.
    """

    parameters: dict[int, Any]
    others: dict[Any, Any]
    groups: dict[int, Options]
    extra: dict[str, Any]

    def on_cpu(self, copy: bool) -> Shard:
        """Return the same with all tensors on the CPU; see `to_cpu`."""
        return Shard(*(to_cpu(part, copy) for part in self))

    @classmethod
    def of(cls, saved: StateDict, numbers: Sequence[int], groups: Sequence[int]) -> Shard:
        """Return the shard in the `state_dict` of an owner's optimizer.

        Args:
            numbers: of its parameters, in order.
            groups: indices of its groups, in order.
        """
        parameters, others = {}, {}
        for key, value in saved["state"].items():
            if isinstance(key, int) and 0 <= key < len(numbers):
                if not isinstance(value, dict) or value:
                    parameters[numbers[key]] = value
            else:
                others[key] = value
        options = dict(zip(groups, map(options_of, saved["param_groups"]), strict=True))
        extra = {key: value for key, value in saved.items() if key not in STANDARD}
        return cls(parameters, others, options, extra)

    def as_state_dict(
        self, numbers: Sequence[int], groups: Sequence[int], sizes: Sequence[int]
    ) -> StateDict:
        """Return the reverse of `of`; `sizes` are the numbers of parameters of the groups."""
        state: dict[Any, Any] = {
            local: self.parameters[number]
            for local, number in enumerate(numbers)
            if number in self.parameters
        }
        param_groups, start = [], 0
        for index, size in zip(groups, sizes, strict=True):
            params = list(range(start, start + size))
            param_groups.append({**self.groups[index], "params": params})
            start += size
        return {**self.extra, "state": state | self.others, "param_groups": param_groups}


class Outline(NamedTuple):
    """The properties of a shard that are checked before any is loaded.

    Attributes:
        shapes: number of a parameter -> name of a tensor in its state -> shape.
        groups: index of a group -> its hyperparameters.
    """

    shapes: dict[int, dict[str, Shape]]
    groups: dict[int, Options]

    @classmethod
    def of(cls, shard: Shard) -> Outline:
        shapes = {number: _shapes(state) for number, state in shard.parameters.items()}
        return cls(shapes, shard.groups)


def _shapes(state: Any) -> dict[str, Shape]:
    if not isinstance(state, Mapping):
        return {}
    return {k: tuple(v.shape) for k, v in state.items() if isinstance(v, torch.Tensor)}


def to_cpu(value: Any, copy: bool) -> Any:
    """Return the same with all tensors on the CPU; copies of all, or of those that were not."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, dict):
        return {key: to_cpu(item, copy) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_cpu(item, copy) for item in value)
    return value


# On the owner.


def mismatches(
    outline: Outline,
    optimizer: torch.optim.Optimizer,
    shapes: Mapping[int, Shape],
    held: Shard,
) -> list[str]:
    """Return the mismatches between a shard and an owner's optimizer, in words.

    Args:
        shapes: those of the parameters.
        held: what the optimizer has now.
    """
    found = []
    kind = type(optimizer).__name__
    for index, options in outline.groups.items():
        missing = _missing(options, optimizer)
        if missing:
            found.append(f"parameter group {index} has no {', '.join(missing)} for {kind}")
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    for number, tensors in outline.shapes.items():
        now = _shapes(held.parameters.get(number, {}))
        for name, shape in tensors.items():
            fits = shape == now[name] if name in now else True
            if is_torchs:
                fits = _fits(shape, shapes[number])
            if not fits:
                found.append(
                    f"parameter {number} has shape {shapes[number]}, and its {name!r} {shape}"
                )
    return found


def _missing(options: Options, optimizer: torch.optim.Optimizer) -> list[str]:
    """Hyperparameters that the optimizer would miss, by its own rules for old checkpoints."""
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__, defaults=dict(optimizer.defaults))
    group = {**options, "params": []}
    probe.__setstate__({"state": {}, "param_groups": [group]})
    needed = [name for name in optimizer.param_groups[0] if name in optimizer.defaults]
    return [name for name in needed if name not in group]


def _fits(shape: Shape, parameter: Shape) -> bool:
    """Return whether an optimizer may have a state of this shape: Adafactor's has rows of one."""
    if all(size == 1 for size in shape):
        return True
    return len(shape) == len(parameter) and all(
        size in (1, full) for size, full in zip(shape, parameter, strict=True)
    )


def initial_state(
    make: Callable[[list[Group]], torch.optim.Optimizer],
    optimizer: torch.optim.Optimizer,
    numbers: Sequence[int],
    groups: Sequence[int],
) -> Shard:
    """Return the state after a first step of zero gradients, on zeros in place of parameters."""
    copies = [
        {**options_of(group), "params": [torch.zeros_like(p).detach() for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    scratch = make(copies)
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group, copied in zip(optimizer.param_groups, scratch.param_groups, strict=True):
        for parameter, copy in zip(group["params"], copied["params"], strict=True):
            if parameter.requires_grad:
                copy.grad = torch.zeros_like(copy)
                if is_sparse:
                    copy.grad = copy.grad.to_sparse(1)
    scratch.step()
    return Shard.of(scratch.state_dict(), numbers, groups)


# Where the handle is.


def merge(shards: Iterable[Shard], groups: Sequence[Group]) -> StateDict:
    """Return the whole `state_dict`.

    Args:
        groups: of the handle; their hyperparameters are used where no shard has them.

    Raises:
        RuntimeError: an owner has a group that the handle does not know.
    """
    merged: StateDict = {}
    state: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    options: dict[int, Options] = {}
    for shard in shards:
        state |= shard.parameters
        others = {**shard.others, **others}
        options = {**shard.groups, **options}
        merged = {**shard.extra, **merged}
    check_groups(options, groups)
    state = {number: state[number] for number in sorted(state)} | others
    param_groups, start = [], 0
    for index, group in enumerate(groups):
        packed = dict(options.get(index, options_of(group)))
        if "param_names" in group:
            packed["param_names"] = list(group["param_names"])
        packed["params"] = list(range(start, start + len(group["params"])))
        start += len(group["params"])
        param_groups.append(packed)
    return {**merged, "state": state, "param_groups": param_groups}


def check_groups(known: Iterable[int], groups: Sequence[Group]) -> None:
    """Raises RuntimeError if an owner has a group that the handle does not know."""
    unknown = [index for index in known if index >= len(groups)]
    if unknown:
        raise RuntimeError(
            f"parameter group {unknown[0]} was added through another handle of this optimizer, and "
            "this one does not know its parameters: pass the handle on after adding groups"
        )


def split(state_dict: Any, groups: Sequence[Group]) -> dict[str, Shard]:
    """Return each owner's part of the state to load, by name.

    Raises:
        TypeError: that is no `state_dict` of an optimizer.
        ValueError: it is that of another model.
    """
    state, param_groups, extra = _parts(state_dict)
    check_sizes(param_groups, groups)
    ids = [key for group in param_groups for key in group["params"]]
    number_of = {key: number for number, key in enumerate(ids)}
    owners = [rref.owner_name() for group in groups for rref in group["params"]]
    shards = {owner: Shard({}, {}, {}, extra) for owner in owners}
    for key, value in state.items():
        if key in number_of:
            number = number_of[key]
            shards[owners[number]].parameters[number] = value
        elif isinstance(key, int):
            raise ValueError(f"state_dict has state of a parameter {key}, which is in no group")
        else:
            for shard in shards.values():
                shard.others[key] = value
    for index, (saved, group) in enumerate(zip(param_groups, groups, strict=True)):
        for rref in group["params"]:
            shards[rref.owner_name()].groups[index] = options_of(saved)
    return shards


def _parts(state_dict: Any) -> tuple[dict[Any, Any], list[Group], dict[str, Any]]:
    try:
        state, param_groups = state_dict["state"], state_dict["param_groups"]
        extra = {key: value for key, value in state_dict.items() if key not in STANDARD}
        groups = [dict(group) for group in param_groups]
        for group in groups:
            group["params"] = list(group["params"])
        # torch.distributed.checkpoint makes strings of the numbers in "state", of those entries
        # that are no tensors or, without a template, of all.
        joined: dict[Any, Any] = {}
        for key, value in state.items():
            number = int(key) if isinstance(key, str) and key.isdecimal() else key
            joined[number] = {**joined[number], **value} if number in joined else value
    except (TypeError, KeyError, AttributeError) as error:
        raise TypeError(
            "that is no state_dict of an optimizer, a dict with 'state' and 'param_groups': "
            f"{type(error).__name__}: {error}"
        ) from None
    return joined, groups, extra


def normalized(state_dict: Any) -> StateDict:
    """Return it with numbers as keys in "state": torch.distributed.checkpoint makes strings.

    Raises:
        TypeError: that is no `state_dict` of an optimizer.
    """
    state, param_groups, extra = _parts(state_dict)
    return {**extra, "state": state, "param_groups": param_groups}


def check_sizes(saved: Sequence[Group], groups: Sequence[Group]) -> None:
    """Raises ValueError if the saved groups are others, or of other sizes."""
    problem = ""
    if len(saved) != len(groups):
        problem = f"it has {len(saved)} parameter groups, this optimizer has {len(groups)}"
    else:
        for index, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                problem = (
                    f"its parameter group {index} has {len(theirs['params'])} parameters, that of "
                    f"this optimizer {len(ours['params'])}"
                )
                break
    if problem:
        raise ValueError(f"state_dict is that of another model: {problem}")
