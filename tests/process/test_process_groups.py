"""The backend PROCESS_GROUP between real processes."""

from __future__ import annotations

import operator
import os
import threading
from typing import Any

import pytest
import torch
from crew import PATIENCE, Crew, Member, call, leave, leave_all
from known_secrets import SECRET

from farcall import rpc

_arrived = threading.Semaphore(0)
_never = threading.Event()


def join_group(name: str, rank: int, world_size: int | None, init_method: str, **more: Any) -> None:
    more.setdefault("rpc_timeout", PATIENCE)
    options = rpc.ProcessGroupRpcBackendOptions(init_method=init_method, **more)
    rpc.init_rpc(name, rpc.BackendType.PROCESS_GROUP, rank, world_size, options)


def group_of(crew: Crew, count: int) -> list[Member]:
    members = crew.members(count)
    for rank, member in enumerate(members):
        member.start(join_group, member.name, rank, count, crew.init_method)
    for member in members:
        member.result()
    return members


def wait_for_ever() -> None:
    _arrived.release()
    _never.wait()


def wait_until_called() -> None:
    assert _arrived.acquire(timeout=PATIENCE)


def negated_everywhere(size: int, workers: int) -> list[bool]:
    ones = torch.ones(size)
    futures = [rpc.rpc_async(f"w{n}", torch.neg, args=(ones,)) for n in range(workers)]
    return [torch.equal(future.wait(), -ones) for future in futures]


def sum_through(*path: str) -> int:
    """Adds the ids of the workers on the way, each called by the one before."""
    mine = rpc.get_worker_info().id
    return mine + (rpc.rpc_sync(path[0], sum_through, args=path[1:]) if path else 0)


def test_calls_references_and_tensors_of_any_size_between_three_workers(crew: Crew) -> None:
    members = group_of(crew, 3)
    for member in members:
        member.start(negated_everywhere, 3_000_000, 3)
    for member in members:
        assert member.result() == [True] * 3
    assert members[0].run(negated_everywhere, 0, 3) == [True] * 3
    assert members[0].run(sum_through, "w1", "w2", "w0", "w2") == 5
    leave_all(*members)


def test_group_may_be_left_and_joined_again(crew: Crew) -> None:
    members = group_of(crew, 2)
    leave_all(*members)
    for rank, member in enumerate(members):
        member.start(join_group, member.name, rank, 2, crew.init_method)
    for member in members:
        member.result()
    assert members[1].run(call, "w0", operator.add, 1, 2) == 3
    leave_all(*members)


def test_killed_worker_is_lost_and_the_others_go_on(crew: Crew) -> None:
    first, second, third = group_of(crew, 3)
    first.start(call, "w1", wait_for_ever, timeout=0)
    second.run(wait_until_called)
    second.kill()
    error = first.fails()
    assert type(error) is rpc.PeerLost
    assert error.worker == "w1"
    assert first.run(call, "w2", operator.add, 1, 2) == 3
    third.start(call, "w1", operator.add, 1, 2)  # it had no link to that one
    assert type(third.fails()) is rpc.PeerLost
    leave_all(first, third)


def test_worker_that_leaves_at_once_is_told_from_one_that_died(crew: Crew) -> None:
    first, second = group_of(crew, 2)
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    second.run(leave, graceful=False)
    first.start(call, "w1", operator.add, 1, 2)
    error = first.fails()
    assert type(error) is rpc.PeerLost
    assert "left" in str(error) or "shut down" in str(error)
    leave_all(first)


def test_stopped_worker_holds_up_neither_others_nor_a_deadline(crew: Crew) -> None:
    first, second, third = group_of(crew, 3)
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    second.stop()
    first.start(call, "w1", torch.neg, torch.ones(5_000_000), timeout=0.3)
    assert type(first.fails()) is rpc.RpcTimeout
    assert first.run(call, "w2", operator.add, 1, 2) == 3
    first.run(leave, graceful=False)  # it does not wait for the stopped one
    third.run(leave, graceful=False)


def test_missing_ranks_are_named(crew: Crew) -> None:
    (only,) = crew.members(1)
    only.start(join_group, "w0", 0, 3, crew.init_method, rpc_timeout=0.5)
    error = only.fails()
    assert isinstance(error, RuntimeError)
    assert "missing: rank 1, rank 2 of 3" in str(error)


def test_two_workers_of_one_rank_are_told(crew: Crew) -> None:
    first, second = crew.members(2)
    first.start(join_group, "w0", 0, 2, crew.init_method, rpc_timeout=5)
    second.start(join_group, "w1", 0, 2, crew.init_method, rpc_timeout=5)
    errors = {str(first.fails()), str(second.fails())}
    assert any("rank 0 is not unique" in error for error in errors)


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has mpi")
def test_torch_without_mpi_says_so(crew: Crew) -> None:
    (only,) = crew.members(1)
    only.start(join_group, "w0", 0, 1, crew.init_method, group_backend="mpi")
    error = only.fails()
    assert isinstance(error, RuntimeError)
    assert "no mpi: use group_backend='gloo'" in str(error)


def test_workers_can_not_come_and_go(crew: Crew) -> None:
    (only,) = crew.members(1)
    only.start(join_group, "w0", -1, None, crew.init_method)
    error = only.fails()
    assert isinstance(error, ValueError)
    assert "fixed size" in str(error)


def test_secret_that_can_not_be_honoured_is_refused(crew: Crew) -> None:
    only = crew.member(FARCALL_SECRET=SECRET, FARCALL_LISTEN="127.0.0.1")
    only.start(join_group, "w0", 0, 1, crew.init_method)
    with pytest.raises(ValueError, match="authentication"):
        only.result()


def test_group_of_one_works(crew: Crew) -> None:
    (only,) = group_of(crew, 1)
    assert only.run(call, "w0", os.getpid) == only.process.pid
    leave_all(only)
