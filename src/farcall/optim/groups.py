"""Parameter groups: what users give, checked, and what of it changed since it was last sent.

A group is a dict as in `torch.optim`, with RRefs as its "params" and hyperparameters beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from farcall.rref import RRef

Group = dict[str, Any]
Options = dict[str, Any]

# These keys are no hyperparameters, and never sent as such.
RESERVED = ("params", "param_names")


class LocalGroup(NamedTuple):
    """The part of a group that lives on one worker.

    Attributes:
        group: its index in the optimizer.
        options: hyperparameters that were given; the optimizer class adds its defaults.
        params: references to the parameters.
        numbers: of the parameters, counted over all groups and workers in the order given.
        names: of the parameters, if they were given.
    """

    group: int
    options: Options
    params: list[RRef[Any]]
    numbers: list[int]
    names: list[str] | None


class Change(NamedTuple):
    """A change of the hyperparameters of one group."""

    values: Options
    removed: tuple[str, ...]


def parse_groups(params_rref: Iterable[Any]) -> list[Group]:
    """Return the groups of a constructor's argument: RRefs, (name, RRef) pairs, or groups.

    Raises:
        TypeError: it is something else; the message says which item.
        ValueError: it is empty, or only some of the parameters have names.
    """
    items = _ordered(params_rref, "params_rref")
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    if any(isinstance(item, dict) for item in items):
        return [parse_group(item, f"params_rref[{index}]") for index, item in enumerate(items)]
    return [parse_group({"params": items}, "params_rref")]


def parse_group(group: Any, where: str) -> Group:
    """Return a group of the user's, with a list of its references and one of its names, if any.

    Args:
        where: what errors call it.
    """
    if not isinstance(group, dict):
        raise TypeError(
            f"{where} must be a dict like the other parameter groups, not {type(group).__name__}"
        )
    if "params" not in group:
        raise TypeError(f"{where} is a parameter group without 'params', the list of its RRefs")
    given = group["params"]
    parsed = dict(group)
    parsed["params"], names = [], []
    inside = f"{where}['params']" if where != "params_rref" else where
    for index, item in enumerate(_ordered([given] if isinstance(given, RRef) else given, inside)):
        name, rref = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        parsed["params"].append(_reference(rref, f"{inside}[{index}]"))
        if name is not None:
            names.append(name)
    if names:
        if len(names) != len(parsed["params"]):
            raise ValueError(f"{inside}: either all parameters have names, or none")
        parsed["param_names"] = names
    return parsed


def _ordered(items: Any, where: str) -> list[Any]:
    wanted = "a list of RRefs to parameters, or of parameter groups"
    if isinstance(items, set | frozenset):
        raise TypeError(f"{where} must be {wanted}, not a set, whose order changes between runs")
    if isinstance(items, Mapping | RRef | torch.Tensor | str) or not isinstance(items, Iterable):
        raise TypeError(f"{where} must be {wanted}, not {type(items).__name__}")
    return list(items)


def _reference(item: Any, where: str) -> RRef[Any]:
    if isinstance(item, RRef):
        if item._follows:
            raise TypeError(
                f"{where} follows a supervised object: {item!r}. An optimizer has state beside "
                "each parameter, which would not follow: give it plain references, made when the "
                "object is there, and a new optimizer when the object was made again"
            )
        return item
    advice = "make one on the worker where the parameter lives, with rpc.RRef(parameter)"
    raise TypeError(f"{where} must be an RRef to a parameter, not {type(item).__name__}: {advice}")


def options_of(group: Group) -> Options:
    """Return the hyperparameters of a group."""
    return {name: value for name, value in group.items() if name not in RESERVED}


def snapshot(options: Options) -> Options:
    """Return a copy which does not change when the hyperparameters do, be it in place."""
    return {name: _copy(value) for name, value in options.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, float | int | str | None):
        return value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def changes(before: Sequence[Options], groups: Sequence[Group]) -> dict[int, Change]:
    """Return the differences between snapshots of groups and the groups, by their indices."""
    found = {}
    for index, (old, group) in enumerate(zip(before, groups, strict=True)):
        if _is_untouched(old, group):
            continue
        values = {
            name: _copy(value)
            for name, value in group.items()
            if name not in RESERVED and not (name in old and _is_same(old[name], value))
        }
        removed = tuple(name for name in old if name not in group)
        if values or removed:
            found[index] = Change(values, removed)
    return found


def _is_untouched(old: Options, group: Group) -> bool:
    """Return whether all values are the very same, as in nearly every step; a quick look."""
    count = 0
    for name, value in group.items():
        if name not in RESERVED:
            if old.get(name, RESERVED) is not value:
                return False
            count += 1
    return count == len(old)


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, torch.Tensor):
        return old.shape == new.shape and old.dtype == new.dtype and torch.equal(old, new)
    try:
        return bool(old == new)
    except Exception:
        return False  # arrays and the like: sending them once too often is harmless


def apply(options: dict[str, Any], change: Change) -> None:
    """Make a change, of a snapshot or of an owner's group."""
    options.update(change.values)
    for name in change.removed:
        options.pop(name, None)


def complete(group: Group, options: Options) -> None:
    """Set hyperparameters of a group of the handle."""
    group.update({name: _copy(value) for name, value in options.items()})


def by_owner(
    groups: Sequence[Group], index: int = 0, number: int = 0
) -> dict[str, list[LocalGroup]]:
    """Return the parts of groups that live on each worker, by name, in the order of the parameters.

    Args:
        index: of the first group.
        number: of the first parameter.
    """
    owners: dict[str, list[LocalGroup]] = {}
    for place, group in enumerate(groups, index):
        names: list[str] | None = group.get("param_names")
        here: dict[str, LocalGroup] = {}
        for position, rref in enumerate(group["params"]):
            local = here.get(rref.owner_name())
            if local is None:
                local = LocalGroup(place, options_of(group), [], [], None if names is None else [])
                here[rref.owner_name()] = local
            local.params.append(rref)
            local.numbers.append(number)
            number += 1
            if names is not None and local.names is not None:
                local.names.append(names[position])
        for owner, local in here.items():
            owners.setdefault(owner, []).append(local)
    return owners
