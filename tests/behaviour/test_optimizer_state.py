"""The state of a distributed optimizer is saved and loaded, whole or by owner."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from behaviour.optimizing import Model, take_step
from farcall import rpc
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent

OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}),
    (optim.Adafactor, {}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adamax, {}),
    (optim.ASGD, {"t0": 1}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9}),
    (optim.Rprop, {}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]
SGD = {"lr": 0.1, "momentum": 0.9}


def make(kind: Any, items: list[Any], **options: Any) -> Any:
    """Make an optimizer with two groups, of a class of torch or distributed."""
    groups = [{"params": [items[2], items[0]], "weight_decay": 0.1}, {"params": items[3:]}]
    groups.append({"params": [items[1]]})
    if isinstance(items[0], rpc.RRef):
        return DistributedOptimizer(kind, groups, **options)
    return kind(groups, **options)


def assert_same(one: Any, other: Any) -> None:
    """Equal, with all tensors in them."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [dict(group) for group in one["param_groups"]] == other["param_groups"]


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_state_is_that_of_one_process(
    trio: list[Agent], kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    model = Model()
    optimizer = make(kind, model.rrefs, **options)
    local = make(kind, model.here, **options)
    for missing in ((1,), ()):
        model.step_both(optimizer, local, model.draw_gradients(missing))
    assert_same(optimizer.state_dict(), local.state_dict())


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_state_goes_to_one_process_and_back(
    trio: list[Agent], kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    model = Model()
    optimizer = make(kind, model.rrefs, **options)
    local = make(kind, model.here, **options)
    model.step_both(optimizer, local)

    from_file = make(kind, model.here, **{**options, "lr": 5.0})
    from_file.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    model.step_both(optimizer, from_file)
    model.check_equal()

    again = make(kind, model.rrefs, **{**options, "lr": 5.0})
    again.load_state_dict(saved_and_loaded(from_file.state_dict()))
    model.step_both(again, from_file)
    model.check_equal()
    assert again.param_groups[0]["lr"] == from_file.param_groups[0]["lr"]


def test_state_of_sparse_adam_goes_to_one_process_and_back(trio: list[Agent]) -> None:
    model = Model(shapes=((6, 2), (5, 3)))
    optimizer = DistributedOptimizer(optim.SparseAdam, model.rrefs)
    local = optim.SparseAdam(model.here)
    model.step_both(optimizer, local, model.draw_sparse_gradients())
    local.load_state_dict(optimizer.state_dict())
    again = DistributedOptimizer(optim.SparseAdam, model.rrefs)
    again.load_state_dict(local.state_dict())
    model.step_both(again, local, model.draw_sparse_gradients())
    model.check_equal()


def test_parameters_may_have_moved_to_other_workers(trio: list[Agent]) -> None:
    before = Model(workers=("w1", "w2"))
    optimizer = DistributedOptimizer(optim.Adam, before.rrefs)
    local = optim.Adam(before.here)
    before.step_both(optimizer, local)
    after = Model(workers=("w2", "w2", "w0"))
    moved = DistributedOptimizer(optim.Adam, after.rrefs)
    moved.load_state_dict(optimizer.state_dict())
    assert_same(moved.state_dict(), local.state_dict())


def test_state_is_a_copy(trio: list[Agent]) -> None:
    model = Model(workers=("w0",))
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, **SGD)
    take_step(optimizer, model.rrefs, model.draw_gradients())
    for state in (optimizer.state_dict(), optimizer.local_state_dict()):
        kept = copy.deepcopy(state)
        take_step(optimizer, model.rrefs, model.draw_gradients())
        assert_same(state, kept)
    for load in (optimizer.load_state_dict, optimizer.load_local_state_dict):
        load(state)
        take_step(optimizer, model.rrefs, model.draw_gradients())
        assert_same(state, kept)


def test_hyperparameters_changed_since_the_last_step_are_saved(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, **SGD)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["initial_lr"] = 0.7
    saved = optimizer.state_dict()["param_groups"][0]
    assert (saved["lr"], saved["initial_lr"]) == (0.5, 0.7)
    again = DistributedOptimizer(optim.SGD, model.rrefs, **SGD)
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0] == optimizer.param_groups[0]
    local = optim.SGD(model.here, lr=0.5, momentum=0.9)
    model.step_both(again, local)
    model.check_equal()


def test_hooks_of_saving_and_loading_run(pair: list[Agent]) -> None:
    model = Model(workers=("w1",))
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, **SGD)
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "more": 1})
    state = optimizer.state_dict()
    assert state["more"] == 1
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append(state["more"]))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(state)
    assert seen == ["before saving", 1, "loaded"]


class Noted(optim.SGD):
    """Has state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_state_of_no_parameter_is_kept(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(Noted, model.rrefs, **SGD)
    local = Noted(model.here, **SGD)
    model.step_both(optimizer, local)
    assert_same(optimizer.state_dict(), local.state_dict())
    again = DistributedOptimizer(Noted, model.rrefs, **SGD)
    again.load_state_dict(local.state_dict())
    model.step_both(again, local)
    assert again.state_dict()["state"]["steps"] == 2
    assert_same(again.state_dict(), local.state_dict())


@pytest.mark.parametrize("hogwild", [False, True])
def test_state_loaded_is_used_by_the_next_step(trio: list[Agent], hogwild: bool) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs, **SGD, hogwild=hogwild)
    local = optim.SGD(model.here, **SGD)
    states = []
    for _ in range(3):
        model.step_both(optimizer, local)
        states.append(copy.deepcopy(local.state_dict()))
    optimizer.load_state_dict(states[0])
    local.load_state_dict(states[0])
    for _ in range(2):
        model.step_both(optimizer, local)
    model.check_equal()
    assert_same(optimizer.state_dict(), local.state_dict())


# torch.distributed.checkpoint, and the shards of the owners.


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_distributed_checkpoint_saves_and_loads(
    trio: list[Agent], tmp_path: Path, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    model = Model()
    optimizer = make(kind, model.rrefs, **options)
    local = make(kind, model.here, **options)
    model.step_both(optimizer, local)
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)

    again = make(kind, model.rrefs, **{**options, "lr": 5.0})
    again.initialize_state()
    dcp.load({"optimizer": again}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(again.state_dict(), local.state_dict())
    model.step_both(again, local)
    model.check_equal()


def test_checkpoint_can_be_turned_into_a_file_of_torch_save(
    trio: list[Agent], tmp_path: Path
) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.Adam, model.rrefs)
    local = optim.Adam(model.here)
    model.step_both(optimizer, local, model.draw_gradients(missing=(2,)))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file")
    state = torch.load(tmp_path / "file", weights_only=False)["optimizer"]
    again = DistributedOptimizer(optim.Adam, model.rrefs, lr=5.0)
    again.load_state_dict(state)
    assert_same(again.state_dict(), local.state_dict())


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_initializing_the_state_changes_no_parameter(
    trio: list[Agent], kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    model = Model()
    optimizer = make(kind, model.rrefs, **options)
    local = make(kind, model.here, **options)
    optimizer.initialize_state()
    model.check_equal()
    made = optimizer.state_dict()["state"]
    model.step_both(optimizer, local)
    for number, state in local.state_dict()["state"].items():
        assert {k: v.shape for k, v in state.items() if v is not None} == {
            k: v.shape for k, v in made[number].items()
        }


def test_initializing_keeps_the_state_that_is_there(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.Adam, model.rrefs)
    local = optim.Adam(model.here)
    model.step_both(optimizer, local, model.draw_gradients(missing=(0, 1)))
    optimizer.initialize_state()
    state = optimizer.state_dict()["state"]
    assert sorted(state) == [0, 1, 2, 3]
    for number, expected in local.state_dict()["state"].items():
        torch.testing.assert_close(state[number], expected)
    sparse = Model(shapes=((6, 2), (5, 3)))
    optimizer = DistributedOptimizer(optim.SparseAdam, sparse.rrefs)
    optimizer.initialize_state()
    assert sorted(optimizer.state_dict()["state"]) == [0, 1]


def save_shard(optimizer: DistributedOptimizer, folder: Path) -> list[int]:
    """Handler: save this worker's part; gives the numbers of its parameters."""
    state = optimizer.local_state_dict()
    dcp.save(state, checkpoint_id=folder / rpc.get_worker_info().name, no_dist=True)
    return sorted(state["state"])


def load_shard(optimizer: DistributedOptimizer, folder: Path) -> None:
    """Handler: the reverse."""
    state = optimizer.local_state_dict()
    dcp.load(state, checkpoint_id=folder / rpc.get_worker_info().name, no_dist=True)
    optimizer.load_local_state_dict(state)


def test_owners_save_and_load_their_shards_themselves(trio: list[Agent], tmp_path: Path) -> None:
    model = Model()
    optimizer = make(optim.Adam, model.rrefs)
    local = make(optim.Adam, model.here)
    model.step_both(optimizer, local)
    saved = [rpc.rpc_sync(w, save_shard, args=(optimizer, tmp_path)) for w in ("w1", "w2", "w0")]
    assert saved == [[0, 1], [2, 3], []]

    again = make(optim.Adam, model.rrefs, lr=5.0)
    again.initialize_state()
    for worker in ("w1", "w2", "w0"):
        rpc.rpc_sync(worker, load_shard, args=(again, tmp_path))
    assert again.param_groups[0]["lr"] == 5.0
    again.refresh()
    assert again.param_groups[0]["lr"] == 1e-3
    assert_same(again.state_dict(), local.state_dict())
    model.step_both(again, local)
    model.check_equal()


def local_state(optimizer: DistributedOptimizer) -> Any:
    return optimizer.local_state_dict()


def test_shards_together_are_the_whole(trio: list[Agent]) -> None:
    model = Model(workers=("w1", "w0", "w2"))
    optimizer = make(optim.Adam, model.rrefs)
    take_step(optimizer, model.rrefs, model.draw_gradients())
    whole = optimizer.state_dict()
    joined: dict[int, Any] = {}
    for worker in ("w0", "w1", "w2"):
        shard = rpc.rpc_sync(worker, local_state, args=(optimizer,))
        assert shard["param_groups"] == whole["param_groups"]
        assert not joined.keys() & shard["state"].keys()
        joined |= shard["state"]
    torch.testing.assert_close(joined, whole["state"])


# State that does not fit.


def test_state_of_another_model_is_refused_and_nothing_is_loaded(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.Adam, model.rrefs)
    local = optim.Adam(model.here)
    model.step_both(optimizer, local)
    good = local.state_dict()

    def refused(state: Any, *texts: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error) as caught:
            optimizer.load_state_dict(state)
        for text in texts:
            assert text in str(caught.value)
        assert_same(optimizer.state_dict(), good)

    refused(None, "no state_dict of an optimizer", error=TypeError)
    refused({"weight": torch.ones(2)}, "no state_dict of an optimizer", "state", error=TypeError)
    refused(
        optim.Adam([{"params": model.here[:2]}, {"params": model.here[2:]}]).state_dict(),
        "state_dict is that of another model: it has 2 parameter groups, this optimizer has 1",
    )
    refused(
        optim.Adam(model.here[:3]).state_dict(),
        "its parameter group 0 has 3 parameters, that of this optimizer 4",
    )
    other = copy.deepcopy(good)
    other["state"][0]["exp_avg"] = other["state"][0]["exp_avg"].T
    other["state"][3]["exp_avg_sq"] = torch.zeros(7)
    refused(
        other,
        "parameter 0 has shape (3, 2), and its 'exp_avg' (2, 3) (on worker 'w1')",
        "parameter 3 has shape (2, 3), and its 'exp_avg_sq' (7,) (on worker 'w2')",
    )
    refused(optim.SGD(model.here).state_dict(), "parameter group 0 has no betas, eps for Adam")
    stray = {"state": {9: {}}, "param_groups": good["param_groups"]}
    refused(stray, "state of a parameter 9, which is in no group")
    mutilated = copy.deepcopy(good)
    mutilated["param_groups"][0].pop("params")
    refused(mutilated, "no state_dict of an optimizer", error=TypeError)
    with pytest.raises(ValueError, match="another model"):
        rpc.rpc_sync("w1", DistributedOptimizer.load_local_state_dict, args=(optimizer, other))
    assert_same(optimizer.state_dict(), good)
    optimizer.load_state_dict(good)


class Whitening(optim.Optimizer):
    """Has a state of another shape than the parameter."""

    def __init__(self, params: Any, size: int) -> None:
        super().__init__(params, {"size": size})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("basis", torch.eye(group["size"]))


def test_shapes_of_a_users_optimizer_are_compared_with_those_it_has(trio: list[Agent]) -> None:
    model = Model()
    three = DistributedOptimizer(Whitening, model.rrefs, 3)
    four = DistributedOptimizer(Whitening, model.rrefs, 4)
    state = three.state_dict()
    three.load_state_dict(state)
    for optimizer in (three, four):
        take_step(optimizer, model.rrefs, model.draw_gradients())
    four.load_state_dict(four.state_dict())
    with pytest.raises(ValueError, match=r"its 'basis' \(3, 3\)"):
        four.load_state_dict(three.state_dict())


def test_group_that_another_handle_added_is_named(trio: list[Agent]) -> None:
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.rrefs[:2], **SGD)
    rpc.rpc_sync("w1", add_group, args=(optimizer, model.rrefs[2:]))
    for use in (optimizer.state_dict, optimizer.refresh):
        with pytest.raises(RuntimeError, match="group 1 was added through another handle"):
            use()
    with pytest.raises(RuntimeError, match="group 1 was added already, through another handle"):
        optimizer.add_param_group({"params": model.rrefs[2:3]})


def add_group(optimizer: DistributedOptimizer, rrefs: list[Any]) -> None:
    optimizer.add_param_group({"params": rrefs})
