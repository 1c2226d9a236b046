"""Workers that are gone are forgotten after a while, where workers come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from behaviour.helpers import by_remote, by_sync, echo, wait_until
from farcall import rpc
from farcall.errors import UnknownWorker
from farcall.protocol import directory
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

COMING_AND_GOING = 6


@pytest.fixture
def crowd(
    start: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[Agent]]:
    """Starts agents that forget each other at once."""
    monkeypatch.setattr(directory, "DISCARD_SECONDS", 0.0)
    return lambda: start(COMING_AND_GOING + 1, find=lambda name, deadline: None)


def tables(agent: Agent) -> dict[str, int]:
    """Return how much is kept of other workers."""
    known, references = agent.directory._machine, agent.references._refs
    found = {
        "incarnations": len(known._by_incarnation),
        "names": len(known._by_key),
        "lost": len(references.losses),
    }
    connections = getattr(agent.endpoint, "_connections", None)
    if connections is not None:
        found["diallers"] = len(connections._diallers)
        found["dialled"] = len(connections._dialled)
    return found


def test_those_that_are_gone_are_forgotten(crowd: Callable[[], list[Agent]]) -> None:
    agents = crowd()
    for agent in agents[1:]:
        assert by_sync(agent.me.name, echo, args=(1,)) == 1
        assert by_remote(agent.me.name, echo, args=(2,)) == 2
        with acting_as(agent):
            assert by_sync("w0", echo, args=(3,)) == 3
    kept = rpc.remote("w1", echo, args=(4,))
    assert kept.to_here() == 4
    for agent in agents[1:]:
        peer = agents[0].directory.resolve(agent.me.name)
        agent.close()
        wait_until(lambda peer=peer: peer.loss_cause is not None)
        wait_until(lambda peer=peer: peer.incarnation in agents[0].references._refs.losses)
    # The last one is still known, the one before by the references alone, and w1 as owner of one.
    wait_until(lambda: tables(agents[0])["incarnations"] == 2)
    most = {"lost": 3, "names": 3 * 2}
    wait_until(lambda: all(size <= most.get(of, 2) for of, size in tables(agents[0]).items()))
    with pytest.raises(rpc.OwnerDied):
        kept.to_here()
    with pytest.raises(UnknownWorker):
        rpc.rpc_sync("w2", echo, args=(5,))
    assert rpc.rpc_sync("w0", echo, args=(6,)) == 6


def test_workers_of_a_fixed_group_are_not_forgotten(
    start: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "DISCARD_SECONDS", 0.0)
    agents = start(4)
    for agent in agents[1:]:
        assert by_sync(agent.me.name, echo, args=(1,)) == 1
        peer = agents[0].directory.resolve(agent.me.name)
        agent.close()
        wait_until(lambda peer=peer: peer.loss_cause is not None)
    for agent in agents[1:]:
        with pytest.raises(rpc.PeerLost):
            rpc.rpc_sync(agent.me.name, echo, args=(1,))
