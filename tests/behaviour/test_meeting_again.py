"""Two living workers that lost each other by mistake meet again, and begin anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import farcall.autograd as dist_autograd
from behaviour.helpers import Gate, echo, in_threads, wait_at, wait_until
from farcall import rpc
from farcall.errors import OwnerDied, PeerLost
from farcall.ids import MET_AGAIN
from farcall.protocol.directory import DISCARD_SECONDS
from farcall.runtime.agent import Agent
from farcall.runtime.membership import searching
from farcall.testing.cluster import acting_as

TIMES = 3


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches for lost workers begin at once."""
    monkeypatch.setattr(searching, "FIRST_SECONDS", 0.0)


def fetch(reference: Any) -> Any:
    return reference.to_here()


def part(one: Agent, other: Agent) -> None:
    """Let one worker take another for dead, and the other hear of that."""
    first, second = one.directory.resolve(other.me.name), other.directory.resolve(one.me.name)
    one.losses.declare_lost(first, "a test said so")
    wait_until(lambda: second.loss_cause is not None)


def wait_until_met(one: Agent, other: Agent) -> None:
    for agent, peer in ((one, other), (other, one)):
        wait_until(lambda agent=agent, peer=peer: agent.directory.known(peer.me.name) is not None)


def settle(agents: list[Agent]) -> None:
    for agent in agents:
        wait_until(lambda agent=agent: not any(agent.references.statistics().values()))


@pytest.mark.usefixtures("at_once")
def test_calls_go_on_with_a_worker_that_was_lost(pair: list[Agent], gate: Gate) -> None:
    for _ in range(TIMES):
        assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
        there = rpc.rpc_async("w1", wait_at, args=(gate,))
        with acting_as(pair[1]):
            assert rpc.rpc_sync("w0", echo, args=(1,)) == 1
            back = rpc.rpc_async("w0", wait_at, args=(gate,))
        gate.wait_for_arrivals(2)
        part(pair[0], pair[1])
        for future in (there, back):
            with pytest.raises(PeerLost):
                future.wait()
        wait_until_met(*pair)
        gate.open()
        gate = Gate()
        assert rpc.rpc_sync("w1", echo, args=(2,)) == 2
        with acting_as(pair[1]):
            assert rpc.rpc_sync("w0", echo, args=(2,)) == 2
    gate.open()
    peer = pair[0].directory.resolve("w1")
    assert peer.incarnation == pair[1].me.incarnation + TIMES * MET_AGAIN


@pytest.mark.usefixtures("at_once")
def test_references_end_and_new_ones_begin(trio: list[Agent]) -> None:
    first, second, third = trio
    old = rpc.remote("w1", echo, args=(3,))
    assert old.to_here() == 3
    with acting_as(third):
        of_third = rpc.remote("w1", echo, args=(4,))
        assert of_third.to_here() == 4
    part(first, second)
    wait_until_met(first, second)
    with pytest.raises(OwnerDied):
        old.to_here()
    with pytest.raises(OwnerDied):
        rpc.rpc_sync("w2", fetch, args=(old,))
    new = rpc.remote("w1", echo, args=(5,))
    assert new.to_here() == 5
    assert rpc.rpc_sync("w1", fetch, args=(new,)) == 5
    assert rpc.rpc_sync("w2", fetch, args=(new,)) == 5
    # A value of the one that was lost, which a third worker has held all along.
    with acting_as(third):
        assert rpc.rpc_sync("w0", fetch, args=(of_third,)) == 4
        assert rpc.rpc_sync("w0", echo, args=(of_third,)).to_here() == 4
    del old, new, of_third
    settle(trio)


@pytest.mark.usefixtures("at_once")
def test_value_that_was_held_before_is_met_again_by_a_third(trio: list[Agent]) -> None:
    first, second, third = trio
    with acting_as(third):
        reference = rpc.remote("w1", echo, args=(4,))
        assert reference.to_here() == 4
    with acting_as(third):
        rpc.rpc_sync("w0", keep, args=(reference,))
    part(first, second)
    wait_until_met(first, second)
    with pytest.raises(OwnerDied):
        KEPT[0].to_here()
    with acting_as(third):
        assert rpc.rpc_sync("w0", fetch, args=(reference,)) == 4
    with pytest.raises(OwnerDied):
        KEPT[0].to_here()
    del reference
    settle(trio)  # an earlier reference can't be used, and keeps nothing: REF-5
    with pytest.raises(OwnerDied):
        KEPT[0].to_here()
    assert "owner lost" in repr(KEPT[0])
    KEPT.clear()
    settle(trio)


KEPT: list[Any] = []


def keep(reference: Any) -> None:
    KEPT.append(reference)


@pytest.mark.usefixtures("at_once")
def test_context_of_before_is_refused(pair: list[Agent]) -> None:
    with dist_autograd.context():
        rpc.rpc_sync("w1", torch.neg, args=(torch.ones(2, requires_grad=True),))
        part(*pair)
        wait_until_met(*pair)
        with pytest.raises(PeerLost, match="begin a new context"):
            rpc.rpc_sync("w1", torch.neg, args=(torch.ones(2, requires_grad=True),))
    with dist_autograd.context() as context:
        leaf = torch.ones(2, requires_grad=True)
        dist_autograd.backward(context, [rpc.rpc_sync("w1", torch.neg, args=(leaf,)).sum()])
        assert dist_autograd.get_gradients(context)[leaf].tolist() == [-1.0, -1.0]


@pytest.mark.usefixtures("at_once")
def test_graceful_shutdown_of_a_group_in_which_two_had_parted(
    trio: list[Agent],
) -> None:
    part(trio[0], trio[1])
    wait_until_met(trio[0], trio[1])
    with in_threads(*(agent.shutdown for agent in trio)) as results:
        pass
    assert results == [None] * 3


def test_no_worker_searches_for_one_that_has_left(pair: list[Agent]) -> None:
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
    peer = pair[0].directory.resolve("w1")
    pair[1].close()
    wait_until(lambda: peer.loss_cause is not None)
    with pytest.raises(PeerLost):
        rpc.rpc_sync("w1", echo, args=(1,))
    assert not pair[0].losses._search._due


@pytest.mark.usefixtures("at_once")
def test_a_forgotten_worker_is_met_again(start: Callable[..., list[Agent]]) -> None:
    """Lose a worker that has forgotten its loser."""
    agents = start(2, find=lambda name, deadline: None)
    first, second = agents
    peer, other = first.directory.resolve("w1"), second.directory.resolve("w0")
    other.note_loss("a test said so")
    for passed in (0.0, DISCARD_SECONDS + 1, 2 * DISCARD_SECONDS + 2):
        second.directory.on_peer_lost(other, passed)
    assert second.directory.meeting(first.me.incarnation) == 0
    first.losses.declare_lost(peer, "a test said so")
    wait_until(lambda: first.directory.known("w1") is not None)
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
    assert second.directory.meeting(first.me.incarnation) == 1
