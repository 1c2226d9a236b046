"""A call that meets the end of a link waits for what came by it before: answers, a goodbye."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from behaviour.helpers import PATIENCE, Box, Gate, echo, wait_at, wait_until
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.runtime.membership import losses
from farcall.runtime.membership.peers import Peer
from farcall.testing.cluster import acting_as
from farcall.transport.base import Event
from farcall.wire.frames import Frame
from farcall.wire.messages import WhoIs


class HeldEvents:
    """The events of w0: held until a thread waits for the loss of w1, or the test lets them go.

    Args:
        seconds: that such a thread waits.
        opens: whether its wait lets the events go.
    """

    def __init__(
        self,
        agent: Agent,
        peer: Peer,
        monkeypatch: pytest.MonkeyPatch,
        seconds: float,
        opens: bool,
    ) -> None:
        self._gate = gate = threading.Event()
        self.agent, self.peer = agent, peer
        self.waiters: list[int] = []  # threads that wait for the loss
        self.limits: list[float | None] = []  # for how long, in seconds
        read, waiters, limits = agent.handle, self.waiters, self.limits

        class Opening(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                waiters.append(threading.get_ident())
                limits.append(timeout)
                if opens:
                    gate.set()
                return super().wait(timeout)

        def read_later(event: Event) -> None:
            assert gate.wait(PATIENCE)
            read(event)

        monkeypatch.setattr(losses, "EVENT_SECONDS", seconds)
        monkeypatch.setattr(peer, "loss_told", Opening())
        monkeypatch.setattr(agent, "handle", read_later)

    def let_go(self) -> None:
        self._gate.set()

    def lose(self) -> None:
        """Raise the loss of w1, which nothing that was sent has met yet."""
        self.let_go()
        assert self.peer.loss_told.wait(PATIENCE)
        raise self.peer.loss()


def hold(
    pair: list[Agent],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float = PATIENCE,
    opens: bool = True,
) -> HeldEvents:
    first, second = pair
    peer = first.directory.of_incarnation(second.me.incarnation)
    assert peer is not None
    return HeldEvents(first, peer, monkeypatch, seconds, opens)


def by_sync(held: HeldEvents) -> None:
    rpc.rpc_sync("w1", echo, args=(1,))


def by_async(held: HeldEvents) -> None:
    future = rpc.rpc_async("w1", echo, args=(1,))
    assert threading.get_ident() not in held.waiters
    held.let_go()
    future.wait()


def by_remote(held: HeldEvents) -> None:
    reference = rpc.remote("w1", echo, args=(1,))
    assert threading.get_ident() not in held.waiters
    held.let_go()
    reference.to_here()


def by_gradients(held: HeldEvents) -> None:
    """Send a frame as a backward pass does."""
    held.agent.control.send(held.peer, Frame(WhoIs("w9")), time.monotonic() + PATIENCE)
    held.lose()


def by_watch(held: HeldEvents) -> None:
    held.agent.control.watch(held.peer.incarnation)
    held.lose()


@pytest.mark.parametrize("caller", ["w0", "w1"])
@pytest.mark.parametrize("call", [by_sync, by_async, by_remote, by_gradients, by_watch])
def test_a_call_at_the_end_of_a_link_hears_the_goodbye(
    pair: list[Agent],
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[HeldEvents], None],
    caller: str,
) -> None:
    """Call a worker between the end of its link, which either has dialled, and the news of that."""
    first, second = pair
    gone = Box()
    with acting_as(first if caller == "w0" else second):
        assert rpc.rpc_sync("w1" if caller == "w0" else "w0", echo, args=(1,)) == 1
    held = hold(pair, monkeypatch)
    second.shutdown(graceful=False)
    with first.losses.subscribed(gone.put), pytest.raises(rpc.PeerLost, match="it has shut down"):
        call(held)
    assert [loss.worker for loss in gone.wait_for(1)] == ["w1"]
    assert held.peer.left == "it has shut down"


def test_an_answer_that_came_before_the_end_of_a_link_counts(
    pair: list[Agent], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = pair[1]
    future = rpc.rpc_async("w1", wait_at, args=(gate, 7))
    gate.wait_for_arrivals(1)
    held = hold(pair, monkeypatch)
    gate.open()
    wait_until(lambda: second.coordinator.active == 0)
    second.shutdown(graceful=False)
    with pytest.raises(rpc.PeerLost, match="it has shut down"):
        by_sync(held)
    assert future.wait() == 7


@pytest.mark.parametrize(("seconds", "timeout"), [(0.05, PATIENCE), (PATIENCE, 0.5)])
def test_a_call_ends_though_the_event_of_the_end_has_no_turn(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, seconds: float, timeout: float
) -> None:
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
    held = hold(pair, monkeypatch, seconds, opens=False)
    try:
        pair[1].shutdown(graceful=False)
        with pytest.raises((rpc.PeerLost, rpc.RpcTimeout)):
            rpc.rpc_sync("w1", echo, args=(1,), timeout=timeout)
        assert all(limit is not None and limit <= 0.5 for limit in held.limits)
    finally:
        held.let_go()
