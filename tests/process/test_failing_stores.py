"""The store of a group whose workers come and go is stopped, killed, and started again, empty."""

from __future__ import annotations

import operator
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from crew import PATIENCE, Crew, Member, call, join, leave_all
from launching import free_port
from torch.distributed import TCPStore

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import UnknownWorker
from farcall.runtime.membership import lookup

_kept: list[Any] = []


def host(port: int) -> int:
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    _kept.append(store)
    return int(store.port)


def error_of_call(to: str, timeout: float) -> tuple[str, str]:
    try:
        rpc.rpc_sync(to, operator.add, args=(1, 2), timeout=timeout)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def call_each(names: list[str]) -> list[int]:
    return [rpc.rpc_sync(name, operator.add, args=(1, 2)) for name in names]


def remind_often() -> None:
    lookup.REMIND_SECONDS = 0.2


def call_until_it_is_found(to: str) -> int:
    while True:
        try:
            return int(rpc.rpc_sync(to, operator.add, args=(1, 2)))
        except UnknownWorker:
            threading.Event().wait(0.05)


class Group:
    """A store in a process of its own, and workers that meet there."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.port = int(free_port())  # one that is not given to others while the store is gone
        self.start_store()

    def start_store(self) -> None:
        self.store = self._crew.member()
        self.port = self.store.run(host, self.port)

    def join(self, name: str, *, reminds_often: bool = False) -> Member:
        member = self._crew.member()
        if reminds_often:
            member.run(remind_often)
        member.run(join, name, -1, None, f"tcp://127.0.0.1:{self.port}")
        return member


@pytest.fixture
def group(crew: Crew) -> Iterator[Group]:
    group = Group(crew)
    yield group
    group.store.signal(signal.SIGCONT)


def test_a_store_that_is_stopped(group: Group) -> None:
    first, second = group.join("first"), group.join("second")
    group.store.stop()
    # The second knows the first from the store, and the first the second since it was called.
    assert second.run(call, "first", operator.add, 1, 2) == 3
    assert first.run(call, "second", operator.add, 1, 2) == 3
    for member in (first, second):
        kind, text = member.run(error_of_call, "stranger", 0.2)
        assert kind == "RpcTimeout"
        assert "could not be asked" in text
    assert first.run(call_each, ["second"] * 100) == [3] * 100
    group.store.signal(signal.SIGCONT)
    kind, text = first.run(error_of_call, "stranger", PATIENCE)
    assert kind == "UnknownWorker"
    assert "could not be asked" not in text
    leave_all(first, second)


def read(reference: rpc.RRef[list[int]], more: int) -> list[int]:
    return [*reference.to_here(), more]


def leave_calls(to: str) -> None:
    """Leave calls: if one of these waited for the store it would wait forever."""
    reference = rpc.remote(to, operator.add, args=([], [1]), timeout=0)
    futures = [
        rpc.rpc_async(to, read, args=(reference, 2), timeout=0),
        reference.rpc_async(timeout=0).copy(),
    ]
    leaf = torch.ones(3, requires_grad=True)
    context = dist_autograd.context()
    id = context.__enter__()
    loss = rpc.rpc_async(to, torch.sum, args=(leaf,), timeout=0)
    _kept[:] = reference, futures, leaf, context, id, loss


def outcomes_of_calls() -> list[Any]:
    reference, futures, leaf, context, id, loss = _kept
    _kept.clear()
    dist_autograd.backward(id, [loss.wait()])
    gradient = dist_autograd.get_gradients(id)[leaf].tolist()
    context.__exit__(None, None, None)
    return [reference.to_here(), *[future.wait() for future in futures], gradient]


def test_calls_to_a_stranger_while_the_store_is_stopped(group: Group) -> None:
    first, stranger = group.join("first"), group.join("stranger")
    group.store.stop()
    first.run(leave_calls, "stranger")
    group.store.signal(signal.SIGCONT)
    assert first.run(outcomes_of_calls) == [[1], [1, 2], [1], [1.0, 1.0, 1.0]]
    leave_all(first, stranger)


def test_a_store_that_is_killed_and_comes_back_empty(group: Group) -> None:
    first, second = group.join("first"), group.join("second")
    assert second.run(call, "first", operator.add, 1, 2) == 3
    group.store.kill()
    for member in (first, second):
        kind, text = member.run(error_of_call, "third", PATIENCE)
        assert kind == "UnknownWorker"
        assert "could not be asked" in text
    assert first.run(call_each, ["second"] * 100) == [3] * 100
    group.start_store()
    third = group.join("third")
    assert first.run(call, "third", operator.add, 1, 2) == 3  # and it says where it is itself
    assert third.run(call_each, ["first"]) == [3]
    fourth = group.join("fourth")
    assert fourth.run(call, "first", operator.add, 1, 2) == 3
    leave_all(first, second, third, fourth)


def test_members_find_a_newcomer_while_the_store_is_gone(group: Group) -> None:
    first, second = group.join("first"), group.join("second")
    assert second.run(call, "first", operator.add, 1, 2) == 3
    newcomer = group.join("newcomer")
    assert newcomer.run(call, "first", operator.add, 1, 2) == 3
    group.store.kill()
    # The second has never heard of the newcomer, and the first knows it from its handshake.
    assert second.run(call, "newcomer", operator.add, 1, 2) == 3
    assert newcomer.run(call, "second", operator.add, 1, 2) == 3
    leave_all(first, second, newcomer)
    group.start_store()


def test_a_member_that_asks_nothing_is_found_at_a_store_that_was_started_again(
    group: Group,
) -> None:
    idle = group.join("idle", reminds_often=True)
    group.store.kill()
    group.start_store()
    newcomer = group.join("newcomer")
    assert newcomer.run(call_until_it_is_found, "idle") == 3
    leave_all(idle, newcomer)
