"""Strangers in numbers: slow ones, many, noisy ones. A member gets in, and the program goes on."""

from __future__ import annotations

import contextlib
import operator
import socket
from collections.abc import Iterator
from pathlib import Path

import honest
import pytest
import stranger as stranger_steps
from crew import Crew, Member, call, join, leave_all
from patience import PATIENCE

from farcall.transport.connect import visitors

SLOW = 64
MANY = 400
DESCRIPTORS = 256
BUDGET = 64 + 8  # connections that have proven nothing, and what else comes and goes


def stranger(port: int, number: int) -> socket.socket:
    """Connect, from one of as many addresses as 16 connections each need; say a part of a hello."""
    sock = socket.socket()
    sock.bind((f"127.0.1.{1 + number // 16}", 0))
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", port))
    with contextlib.suppress(OSError):
        sock.sendall(b"\x16")  # as TLS begins, and half of a length
    return sock


@contextlib.contextmanager
def flood(port: int, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(stranger(port, number)) for number in range(count)]


def start(crew: Crew, transport: str, **environment: str) -> list[Member]:
    """Return w0, w1 and w2, which meet over TCP only and have not yet called each other."""
    environment = environment or {"FARCALL_SECRET": honest.SECRET}
    names = [f"w{rank}" for rank in range(3)]
    members = [crew.member(name, FARCALL_TRANSPORTS=transport, **environment) for name in names]
    members[0].run(honest.limit_descriptors, DESCRIPTORS)
    members[0].run(honest.count_lines)
    for rank, member in enumerate(members):
        options = {"listen": "127.0.0.1", "paths": ("tcp",)}
        member.start(join, member.name, rank, 3, crew.init_method, **options)
    for member in members:
        member.result()
    return members


# Steps.


def have_all_the_time() -> None:
    """Let strangers of this worker stay: only others make them go, and a member must not wait."""
    visitors.HELLO_SECONDS = visitors.PROOF_SECONDS = 2 * PATIENCE


def test_slow_strangers_do_not_delay_a_member(crew: Crew, transport: str) -> None:
    victim, first, second = start(crew, transport)
    port = victim.run(honest.tcp_port)
    victim.run(have_all_the_time)
    assert first.run(call, "w0", operator.add, 1, 2) == 3
    with flood(port, SLOW):
        assert second.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(victim, first, second)


def test_many_strangers_take_neither_descriptors_nor_threads_nor_the_log(
    crew: Crew, transport: str
) -> None:
    victim, first, second = start(crew, transport)
    port = victim.run(honest.tcp_port)
    assert first.run(call, "w0", operator.add, 1, 2) == 3
    descriptors = victim.run(honest.count_descriptors)
    threads = victim.run(honest.count_threads)
    with flood(port, MANY) as strangers:
        # The last one was accepted or closed, and so was each before it, when a member gets in.
        assert second.run(call, "w0", operator.add, 1, 2) == 3
        assert victim.run(honest.open_files, 32) == 32
        assert victim.run(honest.count_descriptors) <= descriptors + BUDGET
        assert victim.run(honest.count_threads) <= threads + 8
        for sock in strangers[: MANY // 2]:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(4096) is not None
    said = victim.run(honest.lines)
    assert len(said) <= 2 * (MANY // 16 + 1), said
    leave_all(victim, first, second)


@pytest.mark.parametrize("beginning", stranger_steps.BEGINNINGS)
def test_member_gets_in_while_strangers_flood(
    crew: Crew, transport: str, beginning: str, tmp_path: Path
) -> None:
    """Flood from the member's own address, by processes that go on as fast as they can."""
    victim, first, second = start(crew, transport)
    port = victim.run(honest.tcp_port)
    stop = tmp_path / "stop"
    flooders = [crew.member(f"stranger{number}") for number in range(4)]
    assert first.run(call, "w0", operator.add, 1, 2) == 3
    for number, flooder in enumerate(flooders):
        begun = tmp_path / str(number)
        flooder.start(stranger_steps.flood, port, beginning, str(begun), str(stop))
        honest.wait_for(str(begun))
    assert second.run(call, "w0", operator.add, 1, 2) == 3  # they go on until then
    assert victim.run(honest.open_files, 32) == 32
    stop.touch()
    for flooder in flooders:
        assert flooder.result() > 0
    leave_all(victim, first, second)


def test_noisy_strangers_fill_no_log(crew: Crew, transport: str) -> None:
    victim, first, second = start(crew, transport)
    port = victim.run(honest.tcp_port)
    for _ in range(100):
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE) as sock,
            contextlib.suppress(ConnectionError),
        ):
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while sock.recv(4096):
                pass
    assert first.run(call, "w0", operator.add, 1, 2) == 3
    # One line for each address and minute: two, if a minute ended just then.
    assert len(victim.run(honest.lines)) <= 2
    leave_all(victim, first, second)


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_strangers_can_not_use_up_a_place_for_good(crew: Crew, transport: str, path: str) -> None:
    environment = {"FARCALL_SECRET": honest.SECRET}
    first, second = honest.pair(crew, transport, environment=environment, listen="127.0.0.1")
    (url,) = [url for url in second.run(honest.urls) if url.startswith(path)]
    name = url.partition("@")[2]
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(SLOW + 16):
            family = socket.AF_UNIX if name else socket.AF_INET
            sock = stack.enter_context(socket.socket(family))
            sock.settimeout(PATIENCE)
            port = 0 if name else int(url.rpartition(":")[2])
            sock.connect("\0" + name if name else ("127.0.0.1", port))
            socks.append(sock)
        for sock in socks:  # each is closed by the worker, whose patience ends by itself
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(first, second)
