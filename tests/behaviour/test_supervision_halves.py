"""Supervision in a group that falls apart into halves, which meet again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from behaviour.helpers import PATIENCE, wait_until
from farcall import rpc
from farcall.protocol.standing import Term
from farcall.runtime.agent import Agent
from farcall.runtime.membership import searching
from farcall.supervision.handlers import supervisors_of
from farcall.testing.cluster import acting_as

NAME = "counter"


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count


class Split:
    """Halves of a group between which no link can be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *halves: list[Agent]) -> None:
        self.is_healed = False
        self.pairs = [(one, other) for one in halves[0] for other in halves[1]]
        for one, other in self.pairs:
            self._block(monkeypatch, one, other.me.name)
            self._block(monkeypatch, other, one.me.name)
        for one, other in self.pairs:
            one.losses.declare_lost(one.directory.resolve(other.me.name), "the network is cut")
        for one, other in self.pairs:
            wait_until(lambda one=one, other=other: other.directory.known(one.me.name) is None)
        for agent in (*halves[0], *halves[1]):  # hears the news that were under way
            wait_until(lambda agent=agent: not agent.coordinator.going_on)
            heard = threading.Event()
            agent.group.later.post(heard.set)
            assert heard.wait(PATIENCE)

    def _block(self, monkeypatch: pytest.MonkeyPatch, agent: Agent, name: str) -> None:
        connect = agent.endpoint.connect

        def connect_if_healed(worker: Any, deadline: float) -> Any:
            if worker.name == name and not self.is_healed:
                raise TimeoutError("the network is cut")
            return connect(worker, deadline)

        monkeypatch.setattr(agent.endpoint, "connect", connect_if_healed)

    def heal(self) -> None:
        self.is_healed = True
        for one, other in self.pairs:
            for here, there in ((one, other), (other, one)):
                wait_until(
                    lambda here=here, there=there: here.directory.known(there.me.name) is not None
                )


def leaders(agents: list[Agent]) -> list[str]:
    """Return the workers that supervise, as each of them sees it."""
    return [
        agent.me.name
        for agent in agents
        for known in supervisors_of(agent)._all()
        if known.leading is not None
    ]


def is_settled(half: list[Agent]) -> bool:
    """Return whether these know one supervisor, which is one of them, and have one object."""
    states = [supervisors_of(agent).state_of(NAME) for agent in half]
    known = {(state.order, state.leader_id) for state in states if state is not None}
    leading = [agent.me.id for agent in half if leaders([agent])]
    is_one = len(known) == len(leading) == copies(half) == 1
    return is_one and next(iter(known))[1] == leading[0]


def copies(agents: list[Agent]) -> int:
    return sum(agent.names.find(NAME) is not None for agent in agents)


def epoch(agent: Agent) -> int:
    """Return the number of supervisors so far, as a worker knows."""
    state = supervisors_of(agent).state_of(NAME)
    return 0 if state is None else state.epoch


def term(half: list[Agent]) -> Term:
    """Return the term that a half is in."""
    state = supervisors_of(half[0]).state_of(NAME)
    assert state is not None
    return state.term


def count_kept(agent: Agent) -> int:
    """Return the count of the object in the snapshot that a worker keeps; -1 if it keeps none."""
    state = supervisors_of(agent).state_of(NAME)
    found = None if state is None else supervisors_of(agent).snapshots.get(state.key, 0)
    return -1 if found is None else found[1].count


def keepers(agent: Agent) -> list[str]:
    state = supervisors_of(agent).state_of(NAME)
    return [] if state is None else [name for name, _ in state.keepers]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches for lost workers begin soon and repeat often."""
    monkeypatch.setattr(searching, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(searching, "MOST_SECONDS", 0.02)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("transport", ["inproc", "socket"])
def test_halves_that_meet_again_have_one_supervisor_and_one_object(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = start(4)
    follower = rpc.supervise(Counter, on="w1", name=NAME, follow=True)
    plain = rpc.get_object(NAME)
    assert plain.rpc_sync().add() == 1
    wait_until(lambda: all(len(keepers(agent)) == 4 for agent in agents))
    split = Split(monkeypatch, agents[:2], agents[2:])
    # In the other half that one takes over which became a keeper first. If w1 hears of it before
    # it is cut off, it takes over from that one, and makes the object again: either half may win.
    wait_until(lambda: is_settled(agents[:2]) and is_settled(agents[2:]))
    is_first = follower.rpc_sync().add() == 2
    split.heal()
    wait_until(lambda: len(leaders(agents)) == copies(agents) == 1)
    wait_until(lambda: all(sorted(keepers(agent)) == ["w0", "w1", "w2", "w3"] for agent in agents))
    if copies([agents[1]]) and is_first:
        assert plain.rpc_sync().add() == 3
    else:
        with pytest.raises(rpc.OwnerDied):
            plain.rpc_sync().add()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("transport", ["inproc", "socket"])
def test_half_that_loses_drops_its_objects_and_its_snapshots_do_not_count(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w0, *others, w3 = agents = start(4)
    for _ in range(100):
        rpc.supervise(Counter, on="w3", name=NAME, snapshot=0.02)
        wait_until(lambda: all(len(keepers(agent)) == 4 for agent in agents))
        if keepers(w0)[1] != "w3":
            break
        rpc.kill(rpc.get_object(NAME))
        wait_until(lambda: not leaders(agents))
    splits = [Split(monkeypatch, [w0], others)]
    # Of the other half. If w3 hears no more before it is cut off, it takes over from there: its
    # half is in the higher epoch then, and the other one has made the object again.
    wait_until(lambda: epoch(w3) >= 2)
    splits.append(Split(monkeypatch, [w3], others))
    halves = [w0, w3], others
    wait_until(lambda: all(map(is_settled, halves)))
    loser, winner = sorted(halves, key=term)
    with acting_as(loser[0]):
        assert rpc.get_object(NAME, follow=True).rpc_sync().add(100) == 100
        lost = rpc.get_object(NAME)  # keeps it, unless it is dropped
    wait_until(lambda: any(count_kept(agent) == 100 for agent in loser))
    with acting_as(winner[0]):
        assert rpc.get_object(NAME, follow=True).rpc_sync().add(7) == 7
    for split in splits:
        split.heal()
    wait_until(lambda: len(leaders(winner)) == len(leaders(agents)) == 1)
    wait_until(lambda: copies(winner) == copies(agents) == 1)
    with acting_as(loser[0]), pytest.raises(rpc.OwnerDied):
        lost.rpc_sync().add()
    wait_until(lambda: all(len(keepers(agent)) == 4 for agent in agents))
    wait_until(lambda: any(count_kept(agent) == 7 for agent in loser))
    for agent in winner:
        agent.close()
    wait_until(lambda: len(leaders(loser)) == copies(loser) == 1)
    with acting_as(loser[0]):
        assert rpc.get_object(NAME, follow=True).rpc_sync(retry=5).add() == 8


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("transport", ["inproc", "socket"])
def test_half_hears_that_the_object_was_killed_in_the_other_half_that_wins(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = start(4)
    follower = rpc.supervise(Counter, on="w1", name=NAME, follow=True)
    wait_until(lambda: all(len(keepers(agent)) == 4 for agent in agents))
    halves = agents[:2], agents[2:]
    split = Split(monkeypatch, *halves)
    wait_until(lambda: all(map(is_settled, halves)))
    loser, winner = sorted(halves, key=term)
    with acting_as(winner[0]):
        rpc.kill(rpc.get_object(NAME))
    wait_until(lambda: copies(winner) == 0 and not leaders(winner))
    assert is_settled(loser)
    split.heal()
    wait_until(lambda: copies(agents) == 0 and not leaders(agents))
    with pytest.raises(rpc.Cancelled, match="was killed"):
        follower.rpc_sync().add()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("transport", ["inproc", "socket"])
def test_worker_that_was_lost_by_mistake_is_a_keeper_again_and_takes_over(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = start(4)
    rpc.supervise(Counter, on="w1", name=NAME, follow=True)
    wait_until(lambda: all(len(keepers(agent)) == 4 for agent in agents))
    split = Split(monkeypatch, agents[:1], agents[3:])
    wait_until(lambda: "w3" not in keepers(agents[1]))
    split.heal()
    wait_until(lambda: all("w3" in keepers(agent) for agent in agents))
    for agent in agents[:3]:
        agent.close()
    wait_until(lambda: leaders(agents[3:]) == ["w3"])
    with acting_as(agents[3]):
        assert rpc.get_object(NAME, follow=True).rpc_sync().add() == 1


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("transport", ["inproc", "socket"])
def test_following_reference_leads_on_after_its_owner_was_lost_by_mistake(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = start(3)
    follower = rpc.supervise(Counter, on="w1", name=NAME, follow=True)
    wait_until(lambda: all(len(keepers(agent)) == 3 for agent in agents))
    with acting_as(agents[2]):
        own = rpc.get_object(NAME, follow=True)
        assert own.rpc_sync().add() == 1
        split = Split(monkeypatch, agents[1:2], agents[2:])
        split.heal()
        assert own.rpc_sync(timeout=10 * PATIENCE).add() == 2
    assert follower.rpc_sync().add() == 3
