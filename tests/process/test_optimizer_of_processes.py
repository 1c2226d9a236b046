"""The distributed optimizer with real processes: a killed owner, and one checkpoint of several."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from crew import Crew, leave_all
from patience import PATIENCE

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import PeerLost, without_address
from farcall.optim import DistributedOptimizer

STATE: dict[str, Any] = {}  # of a member, from step to step


def make_parameter(values: torch.Tensor) -> torch.nn.Parameter:
    torch.set_num_threads(1)
    return torch.nn.Parameter(values.clone())


def weighted_sum(parameter: rpc.RRef[Any], weights: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (parameter.local_value() * weights).sum()
    return result


def parameters(owners: list[str], values: list[torch.Tensor]) -> list[rpc.RRef[Any]]:
    return [
        rpc.remote(owner, make_parameter, args=(value,))
        for owner, value in zip(owners, values, strict=True)
    ]


def take_step(
    optimizer: DistributedOptimizer, rrefs: list[rpc.RRef[Any]], gradients: list[torch.Tensor]
) -> None:
    with dist_autograd.context() as context_id:
        terms = [
            rpc.rpc_sync(rref.owner(), weighted_sum, args=(rref, gradient))
            for rref, gradient in zip(rrefs, gradients, strict=True)
        ]
        dist_autograd.backward(context_id, [torch.stack(terms).sum()])
        optimizer.step(context_id)


# A killed owner.


def train_once() -> None:
    STATE["rrefs"] = parameters(["w1", "w2"], [torch.zeros(2), torch.zeros(2)])
    STATE["optimizer"] = DistributedOptimizer(torch.optim.SGD, STATE["rrefs"], lr=1.0)
    take_step(STATE["optimizer"], STATE["rrefs"], [torch.ones(2), torch.ones(2)])


def step_without_owner() -> tuple[str, list[str], float, list[float]]:
    optimizer, rrefs = STATE["optimizer"], STATE["rrefs"]
    with dist_autograd.context() as context_id:
        term = rpc.rpc_sync("w2", weighted_sum, args=(rrefs[1], torch.ones(2)))
        dist_autograd.backward(context_id, [term])
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            optimizer.step(context_id)
        seconds = time.monotonic() - start
    notes = without_address(caught.value.__notes__)
    return caught.value.worker, notes, seconds, rrefs[1].to_here().tolist()


def test_step_after_an_owner_was_killed_names_it_and_the_other_steps(crew: Crew) -> None:
    trainer, owner, other = crew.group(3)
    trainer.run(train_once)
    owner.kill()
    worker, notes, seconds, value = trainer.run(step_without_owner)
    assert worker == "w1"
    assert notes == ["step failed on worker 'w1'", "... but not on 'w2'"]
    assert value == [-2.0, -2.0]
    assert seconds < PATIENCE / 2, "not at the timeout of the call"
    leave_all(trainer, other)


# One checkpoint, written and read by the owners together.


def join_process_group(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)


def save(optimizer: DistributedOptimizer, folder: str) -> list[int]:
    state = optimizer.local_state_dict()
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    return sorted(state["state"])


def load(optimizer: DistributedOptimizer, folder: str) -> list[int]:
    state = {"optimizer": optimizer.local_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_local_state_dict(state["optimizer"])
    return sorted(state["optimizer"]["state"])


def on_owners(step: Any, *args: Any) -> list[Any]:
    futures = [rpc.rpc_async(owner, step, args=args) for owner in ("w1", "w2")]
    found: list[Any] = torch.futures.wait_all(futures)
    return found


def save_and_load(folder: str) -> tuple[list[Any], list[Any], float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    here = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(5)]
    values = [parameter.detach() for parameter in here]
    rrefs = parameters(["w1", "w2", "w1", "w2", "w1"], values)
    optimizer = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.1)
    local = torch.optim.Adam(here, lr=0.1)
    gradients = [torch.randn(3, 4) for _ in here]
    take_step(optimizer, rrefs, gradients)
    for parameter, gradient in zip(here, gradients, strict=True):
        parameter.grad = gradient
    local.step()

    saved = on_owners(save, optimizer, folder)
    # The parameters have moved since.
    rrefs = parameters(["w2", "w2", "w2", "w1", "w1"], values)
    again = DistributedOptimizer(torch.optim.Adam, rrefs, lr=5.0)
    again.initialize_state()
    loaded = on_owners(load, again, folder)
    again.refresh()
    whole, expected = again.state_dict(), local.state_dict()
    torch.testing.assert_close(whole["state"], expected["state"], rtol=0, atol=0)
    assert whole["param_groups"] == expected["param_groups"]
    on_owners(dist.destroy_process_group)
    return saved, loaded, again.param_groups[0]["lr"]


def test_owners_write_one_checkpoint_and_read_it_for_other_shards(
    crew: Crew, tmp_path: Path
) -> None:
    driver, *owners = crew.group(3)
    for rank, owner in enumerate(owners):
        owner.start(join_process_group, rank, f"{tmp_path}/group")
    for owner in owners:
        owner.result()
    saved, loaded, rate = driver.run(save_and_load, f"{tmp_path}/checkpoint")
    assert saved == [[0, 2, 4], [1, 3]]
    assert loaded == [[3, 4], [0, 1, 2]]
    assert rate == 0.1
    leave_all(driver, *owners)
