"""References whose owner the receiver has not met, and can't look up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from behaviour.helpers import echo, wait_until
from farcall import rpc
from farcall.errors import OwnerDied, PeerLost, RpcTimeout
from farcall.ids import MET_AGAIN, Worker
from farcall.protocol.directory import DISCARD_SECONDS
from farcall.runtime.agent import Agent
from farcall.runtime.membership.lookup import NotAsked, StoreIsLate


def fetch(reference: Any) -> Any:
    return reference.to_here()


def give_back(reference: Any) -> Any:
    return reference


def non_zero(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


class Store:
    """A store of workers, for one that has not met one of the others yet."""

    def __init__(self, agent: Agent, unknown: Worker) -> None:
        self.worker: Worker | None = unknown
        self.is_dark = False
        agent.directory._machine._by_incarnation.pop(unknown.incarnation)
        agent.directory._find = self.find

    def find(self, name: str | int, deadline: float) -> Worker | None:
        if self.is_dark:
            raise NotAsked("no process hosts it")
        return self.worker


@pytest.fixture
def store(trio: list[Agent]) -> Store:
    """Return the store of w1, which does not know w2."""
    return Store(trio[1], trio[2].me)


def test_owner_that_is_found(store: Store) -> None:
    assert rpc.rpc_sync("w1", fetch, args=(rpc.remote("w2", echo, args=(3,)),)) == 3


def test_owner_that_can_not_be_looked_up_is_not_dead(trio: list[Agent], store: Store) -> None:
    reference = rpc.remote("w2", echo, args=(3,))
    store.is_dark = True
    for _ in range(2):
        with pytest.raises(RpcTimeout, match=r"worker 'w2', .* asked: no process hosts it"):
            rpc.rpc_sync("w1", fetch, args=(reference,))
    store.is_dark = False
    assert rpc.rpc_sync("w1", fetch, args=(reference,)) == 3
    del reference
    wait_until(lambda: not trio[2].references._values)
    for agent in trio:
        wait_until(lambda agent=agent: not any(agent.references.statistics().values()))


def test_owner_that_is_not_there_yet_is_not_dead(trio: list[Agent], store: Store) -> None:
    """Take the owner for alive: the store may be restarted, and not know the owner yet."""
    reference = rpc.remote("w2", echo, args=(3,))
    store.worker, worker = None, store.worker
    with pytest.raises(OwnerDied, match="not in the group any more"):
        rpc.rpc_sync("w1", fetch, args=(reference,))
    store.worker = worker
    assert rpc.rpc_sync("w1", fetch, args=(reference,)) == 3


def test_owner_that_was_lost_and_forgotten_and_lives(start: Callable[..., list[Agent]]) -> None:
    agents = start(3, find=lambda name, deadline: agents[2].me)
    directory = agents[1].directory
    peer = directory.resolve("w2")
    agents[1].losses.declare_lost(peer, "a test said so")
    directory.on_peer_lost(peer, time.monotonic() + DISCARD_SECONDS + 1)
    assert directory.of_incarnation(peer.incarnation) is None
    assert rpc.rpc_sync("w1", fetch, args=(rpc.remote("w2", echo, args=(3,)),)) == 3
    assert directory.resolve("w2").incarnation == peer.incarnation + MET_AGAIN


class SlowStore(Store):
    """It does not answer until the test says so."""

    def __init__(self, agent: Agent, unknown: Worker) -> None:
        super().__init__(agent, unknown)
        self.answers = threading.Event()

    def find(self, name: str | int, deadline: float) -> Worker | None:
        if not self.answers.wait(max(0.0, deadline - time.monotonic())):
            raise StoreIsLate("it has not answered in time")
        return self.worker


def test_others_are_served_while_the_store_is_asked(start: Callable[..., list[Agent]]) -> None:
    agents = start(3, num_worker_threads=1, max_threads=2)
    store = SlowStore(agents[1], agents[2].me)
    references = [rpc.remote("w2", echo, args=(number,)) for number in range(20)]
    waiting = [rpc.rpc_async("w1", fetch, args=(one,), timeout=0) for one in references]
    for number in range(20):
        assert rpc.rpc_sync("w1", echo, args=(number,)) == number
    assert not any(future.done() for future in waiting)
    store.answers.set()
    assert [future.wait() for future in waiting] == list(range(20))


def test_shutdown_while_the_store_is_asked(start: Callable[..., list[Agent]]) -> None:
    agents = start(3)
    SlowStore(agents[1], agents[2].me)
    waiting = rpc.rpc_async("w1", fetch, args=(rpc.remote("w2", echo, args=(3,)),), timeout=0)
    wait_until(lambda: agents[2].me.incarnation in agents[1].machine.inquiries.open)
    agents[1].close()
    with pytest.raises(PeerLost):
        waiting.wait()


def by_async(*call: Any, **options: Any) -> Any:
    return rpc.rpc_async(*call, **options).wait()


@pytest.mark.parametrize("way", [rpc.rpc_sync, by_async])
def test_answer_with_a_reference_whose_owner_can_not_be_looked_up(
    trio: list[Agent], way: Any
) -> None:
    reference = rpc.remote("w2", echo, args=(3,))
    kept = rpc.remote("w1", give_back, args=(reference,))
    assert kept.to_here().to_here() == 3
    del reference
    # w2 has answered all that w0 sent: whatever arrives from w2 later makes it known to w0 again.
    wait_until(lambda: non_zero(trio[0].references.statistics()) == {"held": 1})
    store = Store(trio[0], trio[2].me)
    store.is_dark = True
    with pytest.raises(RpcTimeout, match="no process hosts it"):
        way("w1", fetch, args=(kept,))
    store.is_dark = False
    assert way("w1", fetch, args=(kept,)).to_here() == 3
