"""Supervision in a group that falls apart into halves, which meet again."""

from __future__ import annotations

from typing import Any

import pytest

from behaviour.helpers import PATIENCE, wait_until
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.runtime.membership import searching
from farcall.supervision.handlers import supervisors_of
from farcall.testing.cluster import acting_as

NAME = "counter"


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


class Split:
    """Halves of a group between which no link can be made.

    The first worker is cut off last: if it supervises, the others of its half hear of no supervisor
    of the other half before. Else they would take over from that one when they lose it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *halves: list[Agent]) -> None:
        self.is_healed = False
        self.pairs = [(one, other) for one in reversed(halves[0]) for other in halves[1]]
        for one, other in self.pairs:
            self._block(monkeypatch, one, other.me.name)
            self._block(monkeypatch, other, one.me.name)
        for one, other in self.pairs:
            one.losses.lose(one.directory.resolve(other.me.name), "the network is cut")
        for one, other in self.pairs:
            wait_until(lambda one=one, other=other: other.directory.known(one.me.name) is None)

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
    """The workers that supervise, as each of them sees it."""
    return [
        agent.me.name
        for agent in agents
        for plan in supervisors_of(agent)._plans.values()
        if plan.leader is not None
    ]


def copies(agents: list[Agent]) -> int:
    return sum(len(supervisors_of(agent)._made) for agent in agents)


def keepers(agent: Agent) -> list[str]:
    state = supervisors_of(agent).state_of(NAME)
    return [] if state is None else [name for name, _ in state.keepers]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who are lost are looked for soon and often."""
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
    # In the other half that one takes over which became a keeper first.
    wait_until(lambda: leaders(agents[:2]) == ["w0"] and len(leaders(agents[2:])) == 1)
    wait_until(lambda: copies(agents[:2]) == copies(agents[2:]) == 1)
    assert follower.rpc_sync().add() == 2
    last = leaders(agents[2:])
    split.heal()
    wait_until(lambda: leaders(agents) == last and copies(agents) == 1)
    wait_until(lambda: all(sorted(keepers(agent)) == ["w0", "w1", "w2", "w3"] for agent in agents))
    with pytest.raises(rpc.OwnerDied):
        plain.rpc_sync().add()


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
