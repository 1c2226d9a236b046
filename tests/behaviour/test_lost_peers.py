"""When a worker ends: calls to it are lost, its own are cancelled, the others go on."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest

from behaviour.helpers import (
    PATIENCE,
    PROXIES,
    Gate,
    by_async,
    by_remote,
    by_sync,
    echo,
    in_threads,
    wait_at,
    wait_until,
    wait_until_settled,
)
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.runtime.membership.peers import Peer, PendingCall
from farcall.testing.cluster import acting_as


def nested(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args)


def wait_until_made(caller: Agent, count: int) -> None:
    """Wait until so many calls go on: a call after the end is refused, not cancelled."""
    wait_until(lambda: len(caller.completion.open_calls()) == count)


def test_closing_the_callee_ends_all_calls_as_lost(pair: list[Agent], gate: Gate) -> None:
    futures = [rpc.rpc_async("w1", wait_at, args=(gate,)) for _ in range(1000)]

    def sync_call() -> Any:
        with acting_as(pair[0]):
            return rpc.rpc_sync("w1", wait_at, args=(gate,))

    ended = threading.Event()
    closing = threading.Thread(target=lambda: (pair[1].close(), ended.set()), daemon=True)
    with in_threads(*[sync_call] * 8) as results:
        gate.wait_for_arrivals(16)
        closing.start()
        for future in futures:
            with pytest.raises(rpc.PeerLost) as raised:
                future.wait()
            assert raised.value.worker == "w1"
            assert isinstance(raised.value, ConnectionError)
        gate.open()
    assert [type(result) for result in results] == [rpc.PeerLost] * 8
    assert ended.wait(PATIENCE)
    for call in (by_sync, by_async, by_remote):
        with pytest.raises(rpc.PeerLost, match="'w1'"):
            call("w1", echo, (1,))


@pytest.mark.parametrize("fails", [False, True])
def test_answer_of_a_worker_that_leaves_at_once_is_not_lost(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    first, second = pair
    arrived = first.completion.arrived
    is_lost = threading.Event()

    def too_late(peer: Peer, call_id: int) -> PendingCall | None:
        """Be slow to say that the caller has its answer."""
        second.close()
        assert is_lost.wait(PATIENCE)
        return arrived(peer, call_id)

    monkeypatch.setattr(first.completion, "arrived", too_late)
    with first.losses.subscribed(lambda loss: is_lost.set()):
        if fails:
            with pytest.raises(ZeroDivisionError):
                rpc.rpc_sync("w1", operator.truediv, args=(1, 0))
        else:
            assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
    assert first.coordinator.active == 0


def test_closing_the_caller_cancels_its_calls(pair: list[Agent], gate: Gate) -> None:
    futures = [rpc.rpc_async("w1", wait_at, args=(gate,)) for _ in range(100)]

    def sync_call() -> Any:
        with acting_as(pair[0]):
            return rpc.rpc_sync("w1", wait_at, args=(gate,))

    with in_threads(*[sync_call] * 3) as results:
        gate.wait_for_arrivals(16)
        wait_until_made(pair[0], 103)
        pair[0].close()
    assert [type(result) for result in results] == [rpc.Cancelled] * 3
    for future in futures:
        with pytest.raises(rpc.Cancelled, match="agent of 'w0' was shut down"):
            future.wait()
    gate.open()


def test_calls_that_are_answered_while_the_caller_closes_end_too(
    pair: list[Agent], gate: Gate
) -> None:
    futures = [rpc.rpc_async("w1", wait_at, args=(gate,)) for _ in range(100)]
    futures += [rpc.rpc_async("w0", wait_at, args=(gate,)) for _ in range(5)]

    def sync_call(to: str) -> Any:
        with acting_as(pair[0]):
            return rpc.rpc_sync(to, wait_at, args=(gate,))

    calls = [functools.partial(sync_call, to) for to in ("w1", "w1", "w0")]
    closing = threading.Thread(target=pair[0].close, daemon=True)
    with in_threads(*calls) as results:
        gate.wait_for_arrivals(16 + 3)
        wait_until_made(pair[0], 108)
        closing.start()
        gate.open()
    closing.join(PATIENCE)
    assert {type(result) for result in results} <= {rpc.Cancelled, type(None)}
    for future in futures:  # some may have ended just before
        with contextlib.suppress(rpc.Cancelled):
            assert future.wait() is None


def test_a_cancelled_call_says_so(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    pair[0].close()
    with pytest.raises(rpc.Cancelled, match="agent of 'w0' was shut down"):
        future.wait()


def test_other_workers_are_not_hurt_by_a_death(trio: list[Agent], gate: Gate) -> None:
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
    future = rpc.rpc_async("w2", wait_at, args=(gate, 5))
    trio[1].close()
    assert rpc.rpc_sync("w2", echo, args=(1,)) == 1
    gate.open()
    assert future.wait() == 5


def test_a_nested_loss_reaches_the_outer_caller(trio: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", nested, args=("w2", wait_at, gate))
    gate.wait_for_arrivals()
    closing = threading.Thread(target=trio[2].close, daemon=True)
    closing.start()
    with pytest.raises(rpc.PeerLost) as raised:
        future.wait()
    assert raised.value.worker == "w2"
    gate.open()
    closing.join(PATIENCE)


def test_proxies_of_a_dead_owner_raise(pair: list[Agent], gate: Gate) -> None:
    rref = rpc.remote("w1", echo, args=([1],))
    assert rref.to_here() == [1]
    future = rpc.rpc_async("w1", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    closing = threading.Thread(target=pair[1].close, daemon=True)
    closing.start()
    with pytest.raises(rpc.PeerLost):
        future.wait()
    for proxy in PROXIES:
        with pytest.raises(rpc.PeerLost) as raised:
            proxy(rref, "append", 1)
        assert raised.value.worker == "w1"
    gate.open()
    closing.join(PATIENCE)
    wait_until_settled(pair[0])
