"""Pieces of the distributed optimizer that need no workers."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE

from farcall.optim.groups import apply, changes, options_of, snapshot
from farcall.optim.locks import ParameterLocks
from farcall.optim.shadow_parameters import shadow_of
from farcall.optim.shards import Shard, to_cpu


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (0.1, 0.2),
        (1, 1.0),
        (None, 0.0),
        ((0.9, 0.99), (0.8, 0.99)),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.tensor(0.1), 0.1),
        (torch.tensor(1.0), torch.tensor(1)),
        (torch.ones(1), torch.ones(2)),
    ],
)
def test_different_hyperparameters_are_a_change(old: Any, new: Any) -> None:
    before = [snapshot({"value": old})]
    assert changes(before, [{"params": [], "value": old}]) == {}
    found = changes(before, [{"params": [], "value": new}])
    assert found[0].values.keys() == {"value"}
    assert type(found[0].values["value"]) is type(new)
    apply(before[0], found[0])
    assert changes(before, [{"params": [], "value": new}]) == {}


@pytest.mark.parametrize("value", [math.nan, {"a": [1]}, [torch.ones(2)]])
def test_hyperparameters_left_alone_are_no_change(value: Any) -> None:
    assert changes([{"value": value}], [{"params": [], "value": value}]) == {}


def test_arrays_are_sent_again_rather_than_not_at_all() -> None:
    group = {"params": [], "value": np.zeros(2)}
    found = changes([snapshot(options_of(group))], [group])
    assert found[0].values["value"].tolist() == [0, 0]


def test_changes_in_place_are_noticed() -> None:
    group: dict[str, Any] = {"params": [], "list": [1], "tensor": torch.ones(1), "gone": 1}
    before = [snapshot(options_of(group))]
    group["list"].append(2)
    group["tensor"].fill_(3.0)
    group["params"].append("not a hyperparameter")
    del group["gone"]
    (found,) = changes(before, [group]).values()
    assert found.values == {"list": [1, 2], "tensor": torch.tensor([3.0])}
    assert found.removed == ("gone",)
    group["list"].append(3)
    assert found.values["list"] == [1, 2], "the values sent are those compared"


def test_parameters_share_locks_as_optimizers_share_parameters() -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    first, second = ParameterLocks([a]), ParameterLocks([b])
    both, other = ParameterLocks([b, a]), ParameterLocks([c])
    assert not excludes(first, second, PATIENCE)
    assert excludes(first, both)
    assert excludes(second, both)
    assert not excludes(other, both, PATIENCE)
    other.add([a])
    assert excludes(other, first)
    assert excludes(other, ParameterLocks([c]))


def excludes(one: ParameterLocks, other: ParameterLocks, seconds: float = 0.05) -> bool:
    """Return whether a thread waits so long for one lock while another thread holds the other."""
    got_it = threading.Event()

    def take() -> None:
        with one.held():
            got_it.set()

    thread = threading.Thread(target=take)
    with other.held():
        thread.start()
        excluded = not got_it.wait(seconds)
    thread.join(PATIENCE)
    assert got_it.is_set()
    return excluded


def test_locks_end_with_their_parameters() -> None:
    known = ParameterLocks._known
    gc.collect()
    before = len(known)
    parameter = torch.zeros(1)
    locks = ParameterLocks([parameter])
    assert len(known) == before + 1
    del parameter
    gc.collect()
    assert len(known) == before
    del locks


@pytest.mark.parametrize("unnoticed", [False, True])
def test_shadow_shares_memory_and_not_the_gradient(unnoticed: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.is_embedding = True  # type: ignore[attr-defined]
    tensor = shadow_of(parameter, unnoticed)
    tensor.grad = torch.ones(3)
    with torch.no_grad():
        tensor.mul_(2)
    assert parameter.tolist() == [2, 2, 2]
    assert parameter.grad is None
    assert parameter._version == (0 if unnoticed else 1)
    assert tensor.is_embedding  # type: ignore[attr-defined]
    assert tensor.requires_grad


def test_shard_and_state_dict_are_each_others_reverse() -> None:
    saved = {
        "state": {0: {"step": 1}, 2: {"step": 3}, "seen": 5},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
        "version": 7,
    }
    shard = Shard.of(saved, numbers=[4, 1, 9], groups=[0, 3])
    assert shard.parameters == {4: {"step": 1}, 9: {"step": 3}}
    assert shard.others == {"seen": 5}
    assert shard.groups == {0: {"lr": 0.1}, 3: {"lr": 0.2}}
    assert shard.as_state_dict([4, 1, 9], [0, 3], [2, 1]) == saved


def test_copies_on_the_cpu_are_copies_if_asked_for() -> None:
    tensor = torch.ones(2)
    nested = {"a": [tensor, (tensor, 3)], "b": "text"}
    copied, same = to_cpu(nested, copy=True), to_cpu(nested, copy=False)
    tensor.zero_()
    assert copied["a"][0].tolist() == [1, 1]
    assert copied["a"][1][0].tolist() == [1, 1]
    assert same["a"][0].tolist() == [0, 0]
    assert type(copied["a"][1]) is tuple
