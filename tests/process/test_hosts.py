"""Workers of several hosts reach each other, whatever their hosts are called and connected by."""

from __future__ import annotations

import operator
import socket
from typing import Any

import pytest
from crew import Crew, Member, call, join, leave_all
from known_secrets import SECRET
from networks import enter, network
from patience import PATIENCE

from farcall import rpc
from farcall.errors import PeerLost, RendezvousError, RpcTimeout

PORT = 29511


def mean_loopback(name: str) -> None:
    """Resolve this name as 127.0.1.1 from now on, as Debian's /etc/hosts does. A step."""
    look_up = socket.getaddrinfo

    def debian(host: Any, *args: Any, **options: Any) -> Any:
        return look_up("127.0.1.1" if host in (name, name.encode()) else host, *args, **options)

    socket.getaddrinfo = debian


def start_group(members: list[Member], urls: list[str]) -> None:
    for rank, (member, url) in enumerate(zip(members, urls, strict=True)):
        member.start(join, member.name, rank, len(members), url)
    for member in members:
        member.result()


def check_calls_each_way(members: list[Member]) -> None:
    first, second = members
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert second.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(*members)


@pytest.mark.parametrize("ipv6_only", [False, True])
@pytest.mark.parametrize("transport", ["native", "socket"])
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_two_hosts(crew: Crew, ipv6_only: bool, transport: str, scheme: str) -> None:
    if transport == "native":
        pytest.importorskip("farcall._native")
    with network(ipv6_only=ipv6_only) as net:
        members = [
            crew.member(FARCALL_SECRET=SECRET, FARCALL_TRANSPORTS=transport) for _ in range(2)
        ]
        for member, host in zip(members, (net.a, net.b), strict=True):
            member.run(enter, host)
        address = net.addresses[net.a]
        meeting = f"tcp://[{address}]:{PORT}" if ipv6_only else f"tcp://{address}:{PORT}"
        start_group(members, [meeting if scheme == "tcp" else crew.init_method] * 2)
        check_calls_each_way(members)


def test_rank_0_whose_own_name_means_loopback(crew: Crew) -> None:
    with network() as net:
        members = [crew.member(FARCALL_SECRET=SECRET) for _ in range(2)]
        for member, host in zip(members, (net.a, net.b), strict=True):
            member.run(enter, host)
        members[0].run(mean_loopback, "rank-0-host")
        others = f"tcp://{net.addresses[net.a]}:{PORT}"
        start_group(members, [f"tcp://rank-0-host:{PORT}", others])
        check_calls_each_way(members)


def test_loopback_only_is_an_error_in_a_group_of_several_hosts(crew: Crew) -> None:
    with network() as net:
        members = [
            crew.member(FARCALL_SECRET=SECRET, FARCALL_LISTEN="127.0.0.1"),
            crew.member(FARCALL_SECRET=SECRET),
        ]
        for rank, (member, host) in enumerate(zip(members, (net.a, net.b), strict=True)):
            member.run(enter, host)
            member.start(join, member.name, rank, 2, crew.init_method)
        error = members[1].fails()
        assert type(error) is RendezvousError
        assert "listens on loopback only" in str(error)
        members[0].result()


def call_within(seconds: float) -> None:
    rpc.rpc_sync("w1", operator.add, args=(1, 2), timeout=seconds)


@pytest.mark.parametrize("ends", [RpcTimeout, PeerLost])
def test_call_that_gets_no_link_names_the_addresses_that_were_tried(
    crew: Crew, ends: type[Exception]
) -> None:
    bound, timeout = (str(PATIENCE), 1.0) if ends is RpcTimeout else ("1", PATIENCE)
    with network() as net:
        members = [
            crew.member(FARCALL_SECRET=SECRET, FARCALL_DEAD_HOST_TIMEOUT=bound) for _ in range(2)
        ]
        for member, host in zip(members, (net.a, net.b), strict=True):
            member.run(enter, host)
        start_group(members, [crew.init_method] * 2)
        net.cut()
        members[0].start(call_within, timeout)
        error = members[0].fails()
        while "there was no time" in str(error):  # to dial, on a busy machine
            timeout *= 2
            members[0].start(call_within, timeout)
            error = members[0].fails()
        assert type(error) is ends
        assert f"tcp://{net.addresses[net.b]}:" in str(error)
        assert "no answer in time" in str(error)
