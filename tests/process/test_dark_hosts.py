"""A host that goes dark is noticed within the bound, whatever its connections were doing."""

from __future__ import annotations

import operator
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from crew import PATIENCE, Crew, Member, call, check_all_left, join
from known_secrets import SECRET
from networks import Network, enter, network

from farcall import rpc
from farcall.errors import PeerLost
from farcall.runtime.current import current_agent

BOUND = 2.0  # seconds
MEGABYTE = 1 << 20

_heard: list[PeerLost] = []
_hears = threading.Event()
_listening = ExitStack()
_begun: list[rpc.Future[int]] = []
_made: list[rpc.RRef[dict[object, object]]] = []


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture(params=["native", "socket"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        pytest.importorskip("farcall._native")
    return str(request.param)


@pytest.fixture
def pair(crew: Crew, net: Network, transport: str) -> list[Member]:
    return start_pair(crew, net, transport, BOUND)


def start_pair(crew: Crew, net: Network, transport: str, bound: float) -> list[Member]:
    members = [
        crew.member(
            FARCALL_SECRET=SECRET,
            FARCALL_TRANSPORTS=transport,
            FARCALL_DEAD_HOST_TIMEOUT=str(bound),
            FARCALL_TCP_STREAMS="4",
        )
        for _ in range(2)
    ]
    for rank, (member, host) in enumerate(zip(members, (net.a, net.b), strict=True)):
        member.run(enter, host)
        member.start(join, member.name, rank, 2, crew.init_method)
    for member in members:
        member.result()
    return members


def listen_for_losses() -> None:
    def tell(loss: PeerLost) -> None:
        _heard.append(loss)
        _hears.set()

    _listening.enter_context(current_agent().losses.subscribed(tell))


def loss() -> PeerLost:
    assert _hears.wait(PATIENCE)
    return _heard[0]


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel()


def send(to: str, megabytes: int) -> int:
    return int(rpc.rpc_sync(to, size_of, args=(torch.ones(megabytes * MEGABYTE // 4),), timeout=0))


def sleep_long(seconds: float = 10 * PATIENCE) -> None:
    threading.Event().wait(seconds)


def wait_for_call(to: str) -> None:
    rpc.rpc_sync(to, sleep_long, timeout=0)


def test_idle_connections(pair: list[Member], net: Network) -> None:
    first, _ = pair
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    for member in pair:
        member.run(listen_for_losses)
    net.cut()
    for member in pair:
        assert type(member.run(loss)) is PeerLost


def test_call_in_flight(pair: list[Member], net: Network) -> None:
    first, _ = pair
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    first.start(wait_for_call, "w1")
    net.cut()
    assert type(first.fails()) is PeerLost


@pytest.mark.parametrize("megabytes", [0, 64])
def test_call_that_is_sent_into_the_dark(pair: list[Member], net: Network, megabytes: int) -> None:
    first, _ = pair
    assert first.run(send, "w1", 8) == 8 * MEGABYTE // 4
    net.cut()
    first.start(send, "w1", megabytes)
    assert type(first.fails()) is PeerLost


def test_peer_that_does_not_read_when_its_host_goes_dark(pair: list[Member], net: Network) -> None:
    first, second = pair
    assert first.run(send, "w1", 8) == 8 * MEGABYTE // 4
    second.stop()
    first.start(send, "w1", 100)
    time.sleep(2 * BOUND)  # the kernel of a stopped worker answers: that is no end
    net.cut()
    error = first.fails()
    assert type(error) is PeerLost
    assert "dead_host_timeout" in error.cause


def test_peer_that_is_stopped_for_longer_than_the_bound_is_not_lost(pair: list[Member]) -> None:
    first, second = pair
    assert first.run(send, "w1", 8) == 8 * MEGABYTE // 4  # the next goes over several streams
    second.stop()
    first.start(send, "w1", 100)
    time.sleep(3 * BOUND)  # this is the promise: nothing happens in that time
    second.signal(signal.SIGCONT)
    assert first.result() == 100 * MEGABYTE // 4


def test_both_stopped_for_longer_than_the_bound(pair: list[Member]) -> None:
    first, second = pair
    assert first.run(send, "w1", 8) == 8 * MEGABYTE // 4
    second.stop()
    first.start(send, "w1", 100)
    time.sleep(0.5)
    first.stop()
    time.sleep(3 * BOUND)
    first.signal(signal.SIGCONT)
    time.sleep(BOUND)
    second.signal(signal.SIGCONT)
    assert first.result() == 100 * MEGABYTE // 4


def test_dial_into_the_dark(pair: list[Member], net: Network) -> None:
    first, _ = pair
    net.cut()
    first.start(send, "w1", 0)
    error = first.fails()
    assert type(error) is PeerLost
    assert f"tcp://{net.addresses[net.b]}:" in str(error)


def test_handshake_that_the_dark_interrupts(pair: list[Member], net: Network) -> None:
    first, second = pair
    second.stop()  # its kernel takes the connection, and no process answers the hello
    first.start(send, "w1", 0)
    time.sleep(0.5)
    net.cut()
    assert type(first.fails()) is PeerLost


# Hosts that are dark before there is a link to them.


def call_again_and_again(to: str) -> str:
    """Make calls, each with far less time than the bound, until the peer counts as lost."""
    while True:
        try:
            rpc.rpc_sync(to, operator.add, args=(1, 2), timeout=BOUND / 8)
        except rpc.RpcTimeout:
            continue
        except PeerLost as error:
            return error.cause


def send_without_waiting(to: str) -> list[str]:
    """Return the ends of calls without timeouts."""
    value = rpc.rpc_async(to, operator.add, args=(1, 2), timeout=0)
    made = rpc.remote(to, dict, timeout=0)
    ended = []
    for wait in (value.wait, made.to_here):
        try:
            wait()
        except PeerLost as error:  # OwnerDied is one
            ended.append(error.worker)
    return ended


def begin_calls(to: str) -> bool:
    """Return whether a call has ended; a wait for the network would take as long as the test."""
    _begun.append(rpc.rpc_async(to, operator.add, args=(1, 2), timeout=0))
    _made.append(rpc.remote(to, dict, timeout=0))
    return _begun[0].done()


def ends_of_calls() -> tuple[object, object]:
    return _begun[0].wait(), _made[0].to_here()


def test_call_to_a_dark_host_does_not_wait_for_it(crew: Crew, net: Network, transport: str) -> None:
    first, _ = start_pair(crew, net, transport, 2 * PATIENCE)
    net.cut()
    assert first.run(begin_calls, "w1") is False
    net.join()
    assert first.run(ends_of_calls) == (3, {})


def leave_gracefully() -> None:
    rpc.shutdown()


@pytest.mark.parametrize(
    ("step", "args", "expected"),
    [(call_again_and_again, ("w1",), None), (send_without_waiting, ("w1",), ["w1", "w1"])],
)
def test_no_link_to_a_dark_host(
    pair: list[Member], net: Network, step: Any, args: tuple[Any, ...], expected: Any
) -> None:
    first, _ = pair
    net.cut()
    result = first.run(step, *args)
    if expected is None:
        assert "no connection for" in result
    else:
        assert result == expected


@pytest.mark.parametrize("index", [0, 1])
def test_graceful_shutdown_without_a_link_to_a_dark_host(
    pair: list[Member], net: Network, index: int
) -> None:
    """Leave either the worker that leads when the group ends, or the other one."""
    net.cut()
    pair[index].run(leave_gracefully)
    check_all_left(pair[index])


def test_host_that_is_dark_for_a_moment_only(pair: list[Member], net: Network) -> None:
    first, _ = pair
    while True:
        begun = time.monotonic()
        net.cut()
        first.start(call, "w1", operator.add, 1, 2, timeout=0)
        time.sleep(BOUND / 4)  # this is the promise: nothing ends in that time
        net.join()
        was_moment = time.monotonic() - begun < BOUND / 2  # a busy machine makes it longer
        try:
            assert first.result() == 3
            return
        except PeerLost:
            assert not was_moment
        assert first.run(call_until_it_is_here_again, "w1") == 3


def call_until_it_is_here_again(to: str) -> int:
    while True:
        try:
            return int(rpc.rpc_sync(to, operator.add, args=(1, 2)))
        except PeerLost:
            threading.Event().wait(0.05)


@pytest.mark.parametrize("is_linked", [True, False])
def test_host_that_comes_back_after_it_was_given_up(
    pair: list[Member], net: Network, is_linked: bool
) -> None:
    if is_linked:
        assert pair[0].run(call, "w1", operator.add, 1, 2) == 3
    for member in pair:
        member.run(listen_for_losses)
    net.cut()
    for member, other in zip(pair, ("w1", "w0"), strict=True):
        member.start(call_again_and_again, other)
    for member in pair:
        member.result()
        assert type(member.run(loss)) is PeerLost
    net.join()
    for member, other in zip(pair, ("w1", "w0"), strict=True):
        assert member.run(call_until_it_is_here_again, other) == 3
    for member in pair:
        member.start(leave_gracefully)
    for member in pair:
        member.result()


# A name on a host that went dark.


@pytest.mark.parametrize("transport", ["native", "socket"])
def test_name_on_a_dark_host_may_be_taken_over(crew: Crew, net: Network, transport: str) -> None:
    if transport == "native":
        pytest.importorskip("farcall._native")
    options = {
        "FARCALL_SECRET": SECRET,
        "FARCALL_TRANSPORTS": transport,
        "FARCALL_DEAD_HOST_TIMEOUT": str(BOUND),
    }
    hub, dark, successor = (crew.member(**options) for _ in range(3))
    for member, host in ((hub, net.a), (dark, net.b), (successor, net.a)):
        member.run(enter, host)
    hub.run(join, "hub", -1, None, crew.init_method)
    dark.run(join, "guest", -1, None, crew.init_method)
    net.cut()
    successor.run(join, "guest", -1, None, crew.init_method)
    assert hub.run(call, "guest", os.getpid) == successor.process.pid
    assert successor.run(call, "hub", os.getpid) == hub.process.pid
