"""Strangers and workers with another secret: a clear refusal, quickly, and no harm to others."""

from __future__ import annotations

import contextlib
import operator
import os
import random
import socket
from urllib.parse import urlsplit

import pytest
from crew import Crew, Member, call, join, leave_all
from known_secrets import OTHER_SECRET, SECRET
from patience import PATIENCE

from farcall import rpc
from farcall.errors import RendezvousError
from farcall.runtime.current import current_agent


def begin_with_secrets(crew: Crew, *secrets: str) -> list[Member]:
    members = [crew.member(**({"FARCALL_SECRET": secret} if secret else {})) for secret in secrets]
    for rank, member in enumerate(members):
        listen = "127.0.0.1"
        member.start(join, member.name, rank, len(members), crew.init_method, listen=listen)
    return members


def start_with_secrets(crew: Crew, *secrets: str) -> list[Member]:
    members = begin_with_secrets(crew, *secrets)
    for member in members:
        member.result()
    return members


@pytest.mark.parametrize("secrets", [(SECRET, OTHER_SECRET), (SECRET, ""), ("", SECRET)])
def test_workers_with_other_secrets_make_no_group_and_say_what_to_check(
    crew: Crew, secrets: tuple[str, str]
) -> None:
    members = begin_with_secrets(crew, *secrets)
    for member in members:
        # The default timeout of the wait is as long as the test's patience.
        error = member.fails()
        assert type(error) is RendezvousError
        assert "FARCALL_SECRET" in str(error)
        assert SECRET not in str(error)
        assert OTHER_SECRET not in str(error)


def test_workers_with_the_same_secret_reach_each_other(crew: Crew) -> None:
    first, second = start_with_secrets(crew, SECRET, SECRET)
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert second.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(first, second)


def port() -> int:
    urls = [urlsplit(url) for url in current_agent().endpoint.addresses]
    (number,) = [url.port for url in urls if url.scheme == "tcp"]
    assert number is not None
    return number


def throw_at(number: int, data: bytes) -> None:
    with (
        socket.create_connection(("127.0.0.1", number), timeout=PATIENCE) as sock,
        contextlib.suppress(OSError),
    ):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def call_often(to: str, times: int) -> int:
    return sum(rpc.rpc_sync(to, operator.add, args=(n, 1)) == n + 1 for n in range(times))


@pytest.mark.parametrize("secret", ["", SECRET])
def test_random_bytes_on_the_port_disturb_no_call(crew: Crew, secret: str) -> None:
    first, second = start_with_secrets(crew, secret, secret)
    number = second.run(port)
    descriptors = second.run(count_descriptors)
    first.start(call_often, "w1", 3000)
    draw = random.Random(5)
    for _ in range(100):
        throw_at(number, draw.randbytes(draw.randrange(1, 2000)))
    throw_at(number, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert first.result() == 3000
    assert second.run(call_often, "w0", 10) == 10
    leave_all(first, second)
    assert second.run(count_descriptors) <= descriptors + 5


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
