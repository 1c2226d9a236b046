"""Hostile clients and servers of TLS: they cost a worker little, and a member gets in meanwhile."""

from __future__ import annotations

import fcntl
import operator
import socket
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attacker
import honest
import pytest
import tls_drivers
import tls_scripts
from certificates import Authority
from crew import Crew, Member, call, join, leave_all
from patience import PATIENCE
from test_attack_floods import BUDGET, DESCRIPTORS, start
from tls_scripts import AFTERWARDS, CLIENTS, ENDS_LATE, SERVERS, WAIT, Certified, Peer, Script

from farcall.errors import FarcallError

TAKEN = 64 << 10  # bytes that a worker reads of a stranger
GROWTH = 64 << 20  # bytes of memory: 64 connections with their buffers
CALL = 0.9  # seconds of a call that ends by its own limit
LINES = 11  # of the log in a minute, about strangers of all addresses
DIALS = 64  # connections that a call makes while it is not over


def taken(conversation: Any, script: Script) -> int:
    """Play a script against a side of a handshake; return how many bytes that has taken."""
    peer, count = Peer(), 0
    peer.heard += conversation.take()
    for data in script(peer):
        said = len(peer.heard)
        at = 0
        while at < len(data) and conversation.wants and not conversation.is_over:
            piece = data[at : at + conversation.wants]
            conversation.receive(piece)
            at += len(piece)
        count += at
        peer.heard += conversation.take()
        if conversation.is_over or count > TAKEN or (data == WAIT and len(peer.heard) == said):
            break
    return count


def tells_who_is_there(kind: str, error: str) -> bool:
    """Return whether an error tells of a hostile server."""
    if kind == "chain as long as farcall allows":
        return "the peer could not prove that it knows our secret" in error
    return "something that is not farcall is on the other end" in error


@pytest.mark.parametrize("kind", CLIENTS)
def test_worker_reads_little_of_a_hostile_client_of_tls(kind: str) -> None:
    conversation = attacker.accepting_side(honest.SECRET)
    assert taken(conversation, CLIENTS[kind]) <= TAKEN
    assert not conversation.is_trusted


@pytest.mark.parametrize("kind", AFTERWARDS)
def test_worker_reads_little_of_a_client_that_goes_on_behind_the_handshake_of_tls(
    kind: str,
) -> None:
    conversation = attacker.accepting_side(honest.SECRET)
    stolen = attacker.stolen_certificate(honest.SECRET)
    assert taken(conversation, Certified(*stolen, AFTERWARDS[kind])) <= TAKEN
    assert conversation.is_trusted
    assert conversation.failure is not None


@pytest.mark.parametrize("kind", SERVERS)
def test_worker_reads_little_of_a_hostile_server_of_tls(kind: str) -> None:
    conversation = attacker.dialling_side(honest.SECRET)
    assert taken(conversation, SERVERS[kind]) <= TAKEN
    if kind not in ENDS_LATE:
        assert tells_who_is_there(kind, str(conversation.failure))


def unread(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0])


def test_client_that_sends_without_a_pause_leaves_others_their_turn() -> None:
    here, there = socket.socketpair()
    with here, there:
        for data in tls_scripts.hello_in_records_of_five(Peer()):
            there.sendall(data)
        visitor = attacker.visitor(here, honest.SECRET)
        left = [unread(here)]
        while left[-1]:
            visitor.advance()
            left.append(unread(here))
            assert left[-1] < left[-2]
        assert len(left) > 3
        assert there.recv(1)  # the answer to all of it


# With real workers.


class Setting:
    """The credentials of a group, and the bytes that a stranger needs before TLS."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.environment = {"FARCALL_SECRET": honest.SECRET}
        self.beginning = b""
        if kind == "certificates":
            authority = Authority(folder)
            self.environment = authority.issue("worker").environment()
        else:
            self.beginning = attacker.overheard_knock(honest.SECRET)


@pytest.fixture(params=["certificates", "secret and a knock that was overheard"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return Setting(str(request.param), tmp_path)


@pytest.fixture
def members(crew: Crew, transport: str, setting: Setting) -> Iterator[list[Member]]:
    made = start(crew, transport, **setting.environment)
    yield made
    leave_all(*made)


def test_member_gets_in_and_files_open_while_hostile_clients_of_tls_are_there(
    crew: Crew, members: list[Member], setting: Setting, tmp_path: Path
) -> None:
    """Start a client of each kind in each of three processes, again and again."""
    victim, first, second = members
    port = victim.run(honest.tcp_port)
    assert first.run(call, "w0", operator.add, 1, 2) == 3
    descriptors = victim.run(honest.count_descriptors)
    threads = victim.run(honest.count_threads)
    memory = victim.run(honest.reset_peak)
    stop = tmp_path / "stop"
    strangers = [crew.member(f"stranger{number}") for number in range(3)]
    for number, stranger in enumerate(strangers):
        begun = str(tmp_path / f"begun{number}")
        stranger.start(tls_drivers.attack_without_end, port, setting.beginning, begun, str(stop))
    for number in range(3):
        honest.wait_for(str(tmp_path / f"begun{number}"))
    assert second.run(call, "w0", operator.add, 1, 2) == 3
    assert victim.run(honest.open_files, 32) == 32
    assert victim.run(honest.count_descriptors) <= descriptors + BUDGET
    assert victim.run(honest.count_threads) <= threads + 8
    stop.touch()
    for stranger in strangers:
        assert min(stranger.result().values()) > 0
    assert victim.run(honest.peak_bytes) - memory < GROWTH
    said = victim.run(honest.lines)
    assert len(said) <= LINES * (2 + minutes_of(said)), said
    assert first.run(call, "w0", operator.add, 1, 2) == 3


def minutes_of(said: list[str]) -> int:
    """Return how often the log has begun to tell of strangers anew: once a minute."""
    return sum("lines of this kind left out" in line for line in said)


def call_hostile(name: str, timeout: float) -> str:
    """Call a worker in whose place a hostile server listens; return the error."""
    try:
        call(name, operator.add, 1, 2, timeout=timeout)
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_call_to_a_hostile_server_of_tls_ends_in_time_and_costs_little(
    crew: Crew, transport: str
) -> None:
    environment = {"FARCALL_SECRET": honest.SECRET, "FARCALL_TRANSPORTS": transport}
    worker, other = (crew.member(name, **environment) for name in ("w0", "w1"))
    for member in (worker, other):
        member.run(honest.limit_descriptors, DESCRIPTORS)
        options = {"listen": "127.0.0.1", "paths": ("tcp",)}
        member.run(join, member.name, -1, None, crew.init_method, **options)
    hostile = crew.member("hostile")
    ports = hostile.run(tls_drivers.serve_all, len(attacker.overheard_knock(honest.SECRET)))
    worker.run(
        attacker.believe_in,
        {f"ghost{port}": f"tcp://127.0.0.1:{port}" for port in ports.values()},
    )
    assert worker.run(call, "w1", operator.add, 1, 2) == 3
    descriptors = worker.run(honest.count_descriptors)
    threads = worker.run(honest.count_threads)
    memory = worker.run(honest.reset_peak)
    for kind, port in ports.items():
        limit = CALL if kind in ENDS_LATE else PATIENCE
        error = worker.run(call_hostile, f"ghost{port}", limit)
        if kind in ENDS_LATE:
            assert error.startswith("RpcTimeout"), (kind, error)
        else:
            assert tells_who_is_there(kind, error), (kind, error)
        assert worker.run(call, "w1", operator.add, 1, 2) == 3
    assert worker.run(honest.count_descriptors) <= descriptors + 8
    assert worker.run(honest.count_threads) <= threads + 8
    assert worker.run(honest.peak_bytes) - memory < GROWTH
    assert max(hostile.run(tls_drivers.accepted).values()) <= DIALS
    leave_all(worker, other)
