"""Asynchronous calls to a name that is not known yet: nobody waits for the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import PATIENCE, echo, wait_until
from farcall import rpc
from farcall.errors import PeerLost, RpcTimeout, UnknownWorker
from farcall.ids import Worker
from farcall.runtime.agent import Agent
from farcall.runtime.membership.lookup import NotAsked, StoreIsLate


class Store:
    """It answers when the test says so."""

    def __init__(self) -> None:
        self.workers: dict[str | int, Worker] = {}
        self.answers = threading.Event()
        self.is_gone = False

    def find(self, name: str | int, deadline: float) -> Worker | None:
        if self.is_gone:
            raise NotAsked("nobody hosts it")
        if not self.answers.wait(max(0.0, deadline - time.monotonic())):
            raise StoreIsLate("it has not answered in time")
        return self.workers.get(name)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def agents(start: Callable[..., list[Agent]], store: Store) -> list[Agent]:
    """Two, of which the first does not know the second."""
    agents = start(2, find=store.find)
    first, second = agents
    store.workers = {"w1": second.me, 1: second.me}
    directory = first.directory._machine
    directory._by_incarnation.pop(second.me.incarnation)
    for key in ("w1", 1, second.me.info):
        directory._by_key.pop(key)
    return agents


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1)])
def test_calls_go_out_in_order_when_the_store_has_answered(store: Store, to: Any) -> None:
    tensor, numbers = torch.ones(20_000), [1]
    futures = [rpc.rpc_async(to, echo, args=(tensor,)), rpc.rpc_async(to, echo, args=(numbers,))]
    tensor.zero_()  # what was passed was passed before
    numbers.append(2)
    assert not any(future.done() for future in futures)
    store.answers.set()
    assert torch.equal(futures[0].wait(), torch.ones(20_000))
    assert futures[1].wait() == [1]


def test_each_call_ends_at_its_own_deadline(agents: list[Agent], store: Store) -> None:
    patient = rpc.rpc_async("w1", echo, args=(1,), timeout=0)
    hasty = rpc.rpc_async("w1", echo, args=(2,), timeout=0.2)
    with pytest.raises(RpcTimeout, match=r"longer than 0.2 s: .* not answered in time"):
        hasty.wait()
    assert not patient.done()
    store.answers.set()
    assert patient.wait() == 1
    wait_until(lambda: not agents[0].machine.inquiries.is_asking("w1"))


@pytest.mark.usefixtures("agents")
def test_a_name_that_nobody_has(store: Store) -> None:
    store.answers.set()
    with pytest.raises(UnknownWorker, match="'nobody'"):
        rpc.rpc_async("nobody", echo, args=(1,)).wait()


@pytest.mark.usefixtures("agents")
def test_a_store_that_is_gone(store: Store) -> None:
    store.is_gone = True
    with pytest.raises(UnknownWorker, match="could not be asked: nobody hosts it"):
        rpc.rpc_async("w1", echo, args=(1,)).wait()


@pytest.mark.usefixtures("agents", "store")
@pytest.mark.parametrize("wrong", [1.5, None, True])
def test_what_is_no_name_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(UnknownWorker):
        rpc.rpc_async(wrong, echo, args=(1,))


@pytest.mark.usefixtures("agents")
def test_arguments_that_can_not_be_sent_are_refused_at_once(store: Store) -> None:
    store.answers.set()
    with pytest.raises(TypeError, match=r"argument 0 \(generator\)"):
        rpc.rpc_async("w1", echo, args=((n for n in range(3)),))


def test_references_in_the_arguments_are_kept(agents: list[Agent], store: Store) -> None:
    future = rpc.rpc_async("w1", fetch, args=(rpc.RRef(5),))
    store.answers.set()
    assert future.wait() == 5
    wait_until(lambda: not any(agents[0].references.statistics().values()))


def fetch(reference: Any) -> Any:
    return reference.to_here()


def test_graceful_shutdown_waits_for_what_waits(agents: list[Agent], store: Store) -> None:
    future = rpc.rpc_async("w1", echo, args=(1,), timeout=0)
    assert agents[0].coordinator.active == 1
    leaving = threading.Thread(target=agents[0].shutdown)
    leaving.start()
    wait_until(lambda: agents[0].status.is_leaving)
    assert not future.done()
    store.answers.set()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()
    assert future.wait() == 1


def test_shutdown_ends_what_waits(agents: list[Agent]) -> None:
    future = rpc.rpc_async("w1", echo, args=(1,), timeout=0)
    agents[0].close()
    with pytest.raises((PeerLost, rpc.Cancelled)):
        future.wait()
