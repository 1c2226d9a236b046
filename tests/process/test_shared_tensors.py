"""Tensors in shared memory that go to other processes by handle: their contents and leftovers."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import threading
from importlib.util import find_spec
from typing import Any

import load
import pytest
import torch
from crew import Crew, Member, call, join, leave_all
from torch.utils.data import DataLoader

from farcall import rpc

pytestmark = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

SIZE = 256 << 10  # elements; more than is copied anyway
ROUNDS = int(os.environ.get("FARCALL_DEATHS", "4"))
SEED = int(os.environ.get("FARCALL_DEATHS_SEED", "0"))

_kept: dict[str, Any] = {}


# Functions of the callee.


def keep(*tensors: torch.Tensor) -> None:
    _kept["tensors"] = tensors


def write(index: int, value: float) -> None:
    _kept["tensors"][0].view(-1)[index] = value


def read(index: int) -> float:
    return float(_kept["tensors"][0].view(-1)[index])


def layout() -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for t in _kept["tensors"]]


def addresses() -> list[int]:
    return [tensor.data_ptr() for tensor in _kept["tensors"]]


def make_shared() -> torch.Tensor:
    _kept["tensors"] = (torch.zeros(SIZE).share_memory_(),)
    return _kept["tensors"][0]  # type: ignore[no-any-return]


def one_of_ours(number: int) -> torch.Tensor:
    return _kept["ours"][number % len(_kept["ours"])]  # type: ignore[no-any-return]


def drop() -> None:
    _kept["tensors"] = ()


# Functions of the caller.


def is_the_same_memory(to: str) -> tuple[bool, bool]:
    """Return whether callee and caller see each other's writes after the call."""
    tensor = torch.zeros(SIZE).share_memory_()
    rpc.rpc_sync(to, keep, args=(tensor,))
    tensor[7] = 3.0
    seen_there = rpc.rpc_sync(to, read, args=(7,)) == 3.0
    rpc.rpc_sync(to, write, args=(9, 4.0))
    return seen_there, float(tensor[9]) == 4.0


def result_is_the_same_memory(to: str) -> bool:
    result = rpc.rpc_sync(to, make_shared)
    rpc.rpc_sync(to, write, args=(9, 4.0))
    return float(result[9]) == 4.0


def send_views(to: str) -> tuple[list[tuple[Any, ...]], list[int], bool]:
    """Layouts there, distances there, and whether a write through a view arrived."""
    whole = torch.arange(4 * SIZE, dtype=torch.float64).share_memory_()
    square = whole[:SIZE].view(512, 512)
    parameter = torch.nn.Parameter(whole[SIZE:])
    rpc.rpc_sync(to, keep, args=(square.t(), whole[2 * SIZE + 3 :], parameter))
    first, *others = rpc.rpc_sync(to, addresses)
    rpc.rpc_sync(to, write_transposed, args=(5, 6, -1.0))
    arrived = float(square[6, 5]) == -1.0
    return rpc.rpc_sync(to, layout), [other - first for other in others], arrived


def write_transposed(row: int, column: int, value: float) -> None:
    _kept["tensors"][0][row, column] = value


def share_by_name(to: str) -> tuple[bool, bool]:
    torch.multiprocessing.set_sharing_strategy("file_system")
    return is_the_same_memory(to)


def first_of(batch: torch.Tensor) -> float:
    return float(batch[0, 0])


def pass_batches_on(to: str) -> list[float]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    data = [torch.full((SIZE // 8,), float(number)) for number in range(24)]
    loader: DataLoader[torch.Tensor] = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=8,
        num_workers=1,
        multiprocessing_context="fork",
    )
    batches = []
    for batch in loader:
        assert batch.is_shared()
        batches.append(rpc.rpc_sync(to, first_of, args=(batch,)))
    return batches


# Tests.


def pair(crew: Crew, *said: str, **options: Any) -> tuple[Member, Member]:
    """Return two workers; `said` is the option of each, or of both."""
    first, second = crew.members(2)
    for rank, (member, one) in enumerate(zip((first, second), (said * 2)[:2], strict=True)):
        member.start(join, member.name, rank, 2, crew.init_method, shared_tensors=one, **options)
    first.result()
    second.result()
    return first, second


def test_by_handle_each_sees_the_writes_of_the_other(crew: Crew) -> None:
    first, second = pair(crew, "handle")
    assert first.run(is_the_same_memory, "w1") == (True, True)
    assert second.run(is_the_same_memory, "w0") == (True, True)
    assert first.run(result_is_the_same_memory, "w1")
    leave_all(first, second)


def test_views_of_one_storage_keep_their_layout_and_lie_in_one_place(crew: Crew) -> None:
    first, second = pair(crew, "handle")
    layouts, distances, arrived = first.run(send_views, "w1")
    assert layouts == [
        ((512, 512), (1, 512), "torch.float64", False),
        ((2 * SIZE - 3,), (1,), "torch.float64", False),
        ((3 * SIZE,), (1,), "torch.float64", True),
    ]
    assert distances == [8 * (2 * SIZE + 3), 8 * SIZE]
    assert arrived
    leave_all(first, second)


@pytest.mark.parametrize("said", [("copy", "copy"), ("copy", "handle"), ("handle", "copy")])
def test_they_are_copied_unless_both_workers_say_handle(crew: Crew, said: tuple[str, str]) -> None:
    first, second = pair(crew, *said)
    assert first.run(is_the_same_memory, "w1") == (False, False)
    leave_all(first, second)


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_they_are_copied_on_other_paths(crew: Crew, path: str) -> None:
    first, second = pair(crew, "handle", paths=[path, "tcp"])
    assert first.run(is_the_same_memory, "w1") == (False, False)
    leave_all(first, second)


def test_memory_that_is_shared_by_name_is_copied(crew: Crew) -> None:
    first, second = pair(crew, "handle")
    assert first.run(share_by_name, "w1") == (False, False)
    leave_all(first, second)


def test_environment_says_it_as_well(crew: Crew) -> None:
    first, second = crew.members(2, FARCALL_SHARED_TENSORS="handle")
    for rank, member in enumerate((first, second)):
        member.start(join, member.name, rank, 2, crew.init_method)
    first.result()
    second.result()
    assert first.run(is_the_same_memory, "w1") == (True, True)
    leave_all(first, second)


def test_batches_of_a_data_loader_are_passed_on(crew: Crew) -> None:
    first, second = pair(crew, "handle")
    assert first.run(pass_batches_on, "w1") == [0.0, 8.0, 16.0]
    leave_all(first, second)


def test_imported_memory_outlives_its_owner(crew: Crew) -> None:
    first, second = pair(crew, "handle")
    second.run(call, "w0", make_shared_and_keep_there, "w1")
    first.kill()
    second.run(write, 3, 5.0)
    assert second.run(read, 3) == 5.0
    assert second.run(read, 4) == 1.0


def make_shared_and_keep_there(to: str) -> None:
    rpc.rpc_sync(to, keep, args=(torch.ones(SIZE).share_memory_(),))


# Deaths.


def exchange_for_ever(to: str) -> str:
    """Share tensors and use shared ones until the peer dies."""
    try:
        for number in itertools.count():
            tensors = [one_of_ours(number + other) for other in range(3)]
            rpc.rpc_sync(to, keep, args=tuple(tensors))
            assert rpc.rpc_sync(to, add_up, args=(tensors,)) == 3 * SIZE
            assert rpc.rpc_sync(to, one_of_ours, args=(number,))[0] == 1
    except rpc.PeerLost:
        return "PeerLost"
    raise AssertionError("it has counted to infinity")


def share_some() -> None:
    """Beforehand: for a moment each has a name, and a death in that moment would leave it."""
    _kept["ours"] = [torch.ones(SIZE).share_memory_() for _ in range(20)]  # more than are kept


def add_up(tensors: list[torch.Tensor]) -> float:
    return float(sum(tensor.sum() for tensor in tensors))


def newcomer(crew: Crew, name: str) -> Member:
    member = crew.member(name)
    member.run(load.prepare)
    member.run(
        join, name, -1, None, crew.init_method, transports=["native"], shared_tensors="handle"
    )
    member.run(share_some)
    member.run(load.remember)
    return member


def files_of(pids: set[int | None]) -> list[str]:
    """Files of these processes, or of farcall, in /dev/shm; there may be others'."""
    marks = ["farcall", *(f"torch_{pid}_" for pid in pids)]
    return [name for name in os.listdir("/dev/shm") if any(mark in name for mark in marks)]


@pytest.mark.timeout(600 + 10 * ROUNDS)
def test_killing_either_side_at_any_moment_leaves_nothing_behind(crew: Crew) -> None:
    draw = random.Random(SEED)
    members = [newcomer(crew, name) for name in ("left", "right")]
    pids = {member.process.pid for member in members}
    for _ in range(ROUNDS):
        side = draw.randrange(2)
        victim, survivor = members[side], members[1 - side]
        moment = 10 ** draw.uniform(-3.5, -0.3)  # seconds
        survivor.start(exchange_for_ever, victim.name)
        victim.start(exchange_for_ever, survivor.name)
        threading.Event().wait(moment)  # nothing depends on how far they have come
        victim.kill()
        assert survivor.result() == "PeerLost"
        survivor.run(drop)
        assert survivor.run(load.settle) == {}
        assert files_of(pids) == []
        members[side] = newcomer(crew, victim.name)
        pids.add(members[side].process.pid)
    leave_all(*members)
