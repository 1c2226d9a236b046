"""Groups whose workers come and go, in processes: membership, and training that goes on."""

from __future__ import annotations

import os
import queue
import signal
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from crew import PATIENCE, Crew, Member, join, leave, leave_all
from launching import free_port

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.optim import DistributedOptimizer

_heard: queue.SimpleQueue[rpc.MemberEvent] = queue.SimpleQueue()
_kept: dict[str, Any] = {}


# Steps.


def listen() -> None:
    rpc.on_join(_heard.put)
    rpc.on_leave(_heard.put)


def next_event() -> tuple[str, str, str, int]:
    event = _heard.get(timeout=PATIENCE)
    return event.kind, event.worker.name, event.worker.role, event.worker.pid


def who(**more: Any) -> list[tuple[str, str]]:
    return [(one.name, one.role) for one in rpc.workers(**more)]


def wait_for(*names: str, **more: Any) -> list[str]:
    return [one.name for one in rpc.wait_for(*names, **more)]


def barrier(names: list[str]) -> None:
    rpc.barrier(names, timeout=PATIENCE)


def parameter(value: float) -> torch.Tensor:
    return torch.full((2,), value, requires_grad=True)


def times(reference: rpc.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return reference.local_value() * x


def value_of(reference: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return reference.local_value().detach().clone()


def train(owners: list[str]) -> list[float]:
    """Make two steps of w = w - gradient for a parameter of each owner; return the parameters."""
    rpc.wait_for(*owners)
    references = [rpc.remote(owner, parameter, (10.0,)) for owner in owners]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=1.0)
    for _ in range(2):
        with dist_autograd.context() as context:
            parts = [
                rpc.rpc_sync(reference.owner(), times, (reference, torch.full((2,), 3.0)))
                for reference in references
            ]
            dist_autograd.backward(context, [sum(part.sum() for part in parts)])
            optimizer.step(context)
    _kept["references"] = references
    return [rpc.rpc_sync(one.owner(), value_of, (one,))[0].item() for one in references]


def train_through_a_death(owners: list[str], dies: str) -> list[float]:
    """Make three steps as `train` does, while a worker without a part in it dies."""
    rpc.wait_for(*owners, dies)
    gone = threading.Event()
    rpc.on_leave(lambda event: gone.set() if event.worker.name == dies else None)
    references = [rpc.remote(owner, parameter, (10.0,)) for owner in owners]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=1.0)
    for step in range(3):
        with dist_autograd.context() as context:
            parts = [
                rpc.rpc_sync(reference.owner(), times, (reference, torch.full((2,), 3.0)))
                for reference in references
            ]
            if step == 1:
                rpc.rpc_async(dies, die)
            dist_autograd.backward(context, [sum(part.sum() for part in parts)])
            optimizer.step(context)
        assert step == 0 or gone.wait(PATIENCE)
    return [rpc.rpc_sync(one.owner(), value_of, (one,))[0].item() for one in references]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lost_owner(owner: str) -> str:
    """Return the error for the use of a reference to a value of a worker that is gone."""
    [reference] = [one for one in _kept["references"] if one.owner_name() == owner]
    with suppress(rpc.PeerLost):  # its loss may be noticed during this use only
        reference.to_here()
    try:
        reference.to_here()
    except RuntimeError as error:
        return type(error).__name__
    return "a value"


def start(crew: Crew, name: str, rank: int = -1, where: str = "", **options: Any) -> Member:
    member = crew.member(name)
    member.run(join, name, rank, None, where or crew.init_method, **options)
    return member


# Membership.


def test_processes_know_the_workers_that_are_there(crew: Crew) -> None:
    boss = start(crew, "boss")
    boss.run(listen)
    leaves = start(crew, "leaves", role="trainer")
    assert boss.run(next_event) == ("joined", "leaves", "trainer", leaves.process.pid)
    dies = start(crew, "dies")
    assert boss.run(next_event) == ("joined", "dies", "", dies.process.pid)
    assert boss.run(who) == [("boss", ""), ("leaves", "trainer"), ("dies", "")]
    leaves.run(leave)
    assert boss.run(next_event)[:2] == ("left", "leaves")
    dies.kill()
    assert boss.run(next_event)[:2] == ("lost", "dies")
    assert boss.run(who) == [("boss", "")]


def test_one_that_was_killed_is_not_waited_for_in_its_record(crew: Crew) -> None:
    """Wait for the name, although the store still says that the killed worker is there."""
    boss = start(crew, "boss")
    start(crew, "a").kill()
    boss.start(wait_for, "a", timeout=PATIENCE)
    start(crew, "a")
    assert boss.result() == ["a"]
    assert boss.run(who) == [("boss", ""), ("a", "")]


@pytest.mark.parametrize("dies", ["a", "c"])  # the collector, and another
def test_a_barrier_ends_for_all_when_one_is_killed(crew: Crew, dies: str) -> None:
    members = {name: start(crew, name) for name in "abc"}
    for name, member in members.items():
        if name != dies:
            member.start(barrier, ["a", "b", "c"])
    members[dies].kill()
    for name, member in members.items():
        if name != dies:
            error = member.fails()
            assert type(error).__name__ == "PeerLost"
            assert f"'{dies}'" in str(error)


# Training goes on.


@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_others_train_on_when_rank_0_goes(crew: Crew, how: str) -> None:
    first = start(crew, "w0", 0)
    others = [start(crew, f"w{number}") for number in (1, 2)]
    assert others[0].run(train, ["w0", "w2"]) == [4.0, 4.0]
    if how == "leaves":
        first.run(leave)
    else:
        first.kill()
    assert others[0].run(lost_owner, "w0") == "OwnerDied"
    assert others[0].run(lost_owner, "w2") == "a value"
    assert others[0].run(train, ["w1", "w2"]) == [4.0, 4.0]
    late = start(crew, "w3")
    assert late.run(train, ["w1", "w2"]) == [4.0, 4.0]
    assert others[1].run(train, ["w3", "w1"]) == [4.0, 4.0]
    again = start(crew, "w0", 0)
    assert others[1].run(train, ["w0", "w3"]) == [4.0, 4.0]
    leave_all(*others, late, again)


@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_others_train_on_when_the_store_goes_with_rank_0(crew: Crew, how: str) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    first = start(crew, "w0", 0, where)
    others = [start(crew, f"w{number}", number, where) for number in (1, 2)]
    assert others[0].run(train, ["w0", "w2"]) == [4.0, 4.0]
    if how == "leaves":
        first.run(leave)
    first.kill()
    assert others[0].run(lost_owner, "w0") == "OwnerDied"
    assert others[0].run(train, ["w1", "w2"]) == [4.0, 4.0]
    assert others[1].run(train, ["w1", "w2"]) == [4.0, 4.0]
    assert others[1].run(who) == [("w1", ""), ("w2", "")]
    leave_all(*others)


def test_others_train_on_while_rank_0_dies(crew: Crew) -> None:
    start(crew, "boss", 0)
    trainer, *_ = [start(crew, name) for name in ("a", "b", "c")]
    assert trainer.run(train_through_a_death, ["b", "c"], "boss") == [1.0, 1.0]
