"""Members say where a worker is when the store does not: `runtime.membership.members`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from behaviour.helpers import PATIENCE, echo, wait_until
from farcall import rpc
from farcall.errors import PeerLost, RpcTimeout, UnknownWorker
from farcall.ids import Worker, new_incarnation, nth_incarnation
from farcall.runtime.agent import Agent
from farcall.runtime.membership import members
from farcall.runtime.membership.lookup import NotAsked, StoreIsLate
from farcall.testing.cluster import acting_as
from farcall.wire.messages import ThisIs


class Store:
    """It is silent, or gone, or answers."""

    def __init__(self) -> None:
        self.state = "gone"
        self.workers: dict[str | int, Worker] = {}
        self.asked: list[str | int] = []

    def find(self, key: str | int, deadline: float) -> Worker | None:
        self.asked.append(key)
        if self.state == "gone":
            raise NotAsked("no process hosts it")
        if self.state == "silent":
            threading.Event().wait(max(0.0, deadline - time.monotonic()))
            raise StoreIsLate("it has not answered in time")
        return self.workers.get(key)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def agents(start: Callable[..., list[Agent]], store: Store) -> list[Agent]:
    """Return three agents: the first has a link to the second, and does not know the third."""
    agents = start(3, find=store.find)
    first, _, third = agents
    discard(first, third.me)
    rpc.rpc_sync("w1", echo, args=(0,))
    return agents


def discard(agent: Agent, worker: Worker) -> None:
    directory = agent.directory._machine
    directory._by_incarnation.pop(worker.incarnation)
    for key in (worker.name, worker.id, worker.info):
        directory._by_key.pop(key)


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("state", ["gone", "silent"])
@pytest.mark.parametrize("to", ["w2", 2, rpc.WorkerInfo("w2", 2)])
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async])
def test_a_member_says_where_a_worker_is(
    store: Store, state: str, to: Any, call: Callable[..., Any]
) -> None:
    store.state = state
    result = call(to, echo, args=(1,), timeout=PATIENCE)
    assert (result if call is rpc.rpc_sync else result.wait()) == 1


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(("state", "error"), [("gone", UnknownWorker), ("silent", RpcTimeout)])
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async])
def test_a_name_that_no_member_knows(
    store: Store, state: str, error: type[Exception], call: Callable[..., Any]
) -> None:
    store.state = state
    with pytest.raises(error, match="could not be asked"):
        call("nobody", echo, args=(1,), timeout=0.5 if state == "silent" else PATIENCE).wait()


@pytest.mark.usefixtures("agents")
def test_the_store_comes_first(store: Store, agents: list[Agent]) -> None:
    store.state = "answers"
    with pytest.raises(UnknownWorker, match="'w2'"):
        rpc.rpc_sync("w2", echo, args=(1,))
    assert not agents[0].members._rounds


def test_the_store_is_waited_for_while_no_member_knows(agents: list[Agent], store: Store) -> None:
    store.state = "silent"
    discard(agents[1], agents[2].me)
    future = rpc.rpc_async("w2", echo, args=(1,), timeout=PATIENCE)
    wait_until(lambda: bool(agents[0].members._rounds))
    store.workers["w2"] = agents[2].me
    store.state = "answers"
    assert future.wait() == 1


def test_the_owner_of_a_reference_is_found(agents: list[Agent]) -> None:
    with acting_as(agents[2]):
        reference = rpc.RRef("value")
    with acting_as(agents[1]):
        handed_on = rpc.rpc_sync("w2", make, args=("value",))
        assert rpc.rpc_sync("w0", fetch, args=(handed_on,)) == "value"
    del reference


def make(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


def fetch(reference: rpc.RRef[Any]) -> Any:
    return reference.to_here()


def test_a_lost_worker_is_not_found_again(agents: list[Agent]) -> None:
    """Raise `PeerLost`, though another member may not know yet that the worker is gone."""
    first, second, third = agents
    peer = first.directory.add(third.me)
    first.losses.declare_lost(peer, "the test says so")
    assert second.directory.known("w2") is not None
    with pytest.raises(PeerLost, match="the test says so"):
        rpc.rpc_sync("w2", echo, args=(1,))


def test_one_that_came_back_is_found(agents: list[Agent]) -> None:
    """Find it by its new incarnation, which a member has met; this worker knows only the old."""
    first, _, third = agents
    before = msgspec.structs.replace(third.me, incarnation=new_incarnation(), addresses=("gone:1",))
    peer = first.directory.add(before)
    first.losses.declare_lost(peer, "the test says so")
    assert rpc.rpc_sync("w2", echo, args=(1,)) == 1


@pytest.mark.parametrize("key", ["w2", "w9", 2])
def test_an_answer_to_no_question_does_not_count(agents: list[Agent], key: str | int) -> None:
    first, _, third = agents
    peer = first.directory.known("w1")
    assert peer is not None
    first.members.on_answer(peer, ThisIs(key, third.me))
    assert first.directory.known("w2") is None


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("to", "changes"),
    [
        ("w2", {"name": "other", "id": 7}),
        (2, {"name": "no name"}),
        ("w2", {"incarnation": nth_incarnation(5, 1)}),
    ],
)
def test_an_answer_that_can_not_be_one_does_not_count(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, to: Any, changes: dict[str, Any]
) -> None:
    impostor = msgspec.structs.replace(agents[2].me, **changes)

    def answer(peer: Any, message: Any) -> None:
        agents[1].control.post(peer.incarnation, ThisIs(message.key, impostor), 0)

    monkeypatch.setattr(agents[1].members, "on_question", answer)
    with pytest.raises(UnknownWorker, match="could not be asked"):
        rpc.rpc_sync(to, echo, args=(1,))
    assert agents[0].directory.known(impostor.name) is None


def test_members_are_asked_once_a_second_at_most(
    agents: list[Agent], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "ASK_AGAIN", PATIENCE)
    asked: list[Any] = []
    on_question = agents[1].members.on_question

    def count(peer: Any, message: Any) -> None:
        asked.append(message.key)
        on_question(peer, message)

    monkeypatch.setattr(agents[1].members, "on_question", count)
    for _ in range(5):
        with pytest.raises(UnknownWorker):
            rpc.rpc_sync("nobody", echo, args=(1,))
    assert asked == ["nobody"]
