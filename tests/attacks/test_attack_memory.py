"""A member that announces more than it brings: memory is taken as data arrives."""

from __future__ import annotations

import contextlib
import operator

import attacker
import honest
import pytest
from crew import Crew, call, leave_all

MOST_MEMORY = 256 << 20  # bytes; 60,000 announced buffers took over 2 GB


def send_and_hang_up(url: str, secret: str, data: bytes) -> None:
    """Send bytes as this very member, and wait until the other side has read them."""
    name, number, incarnation = attacker.me()
    session = attacker.enter(
        url,
        secret,
        name=name,
        id=number,
        incarnation=incarnation,
        membership=attacker.membership(),
    )
    with contextlib.suppress(OSError):
        session.say(data)
    session.hang_up()


@pytest.mark.parametrize(
    ("buffers", "size"),
    [(60_000, 40_000), (60_000, 1 << 20), (1, 1 << 39), (1 << 20, 64)],
    ids=["60,000 of 40 KB", "60,000 of 1 MiB", "one of 512 GiB", "2^20 of 64 bytes"],
)
@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_announced_buffers_take_no_memory(
    crew: Crew, transport: str, path: str, buffers: int, size: int
) -> None:
    environment = {"FARCALL_SECRET": honest.SECRET}
    victim, member = honest.pair(crew, transport, environment=environment, listen="127.0.0.1")
    (url,) = [url for url in victim.run(honest.urls) if url.startswith(path)]
    before = victim.run(honest.forget_peak)
    frame = attacker.announcing(buffers, size)
    member.run(send_and_hang_up, url, honest.SECRET, frame)
    assert victim.run(honest.peak_bytes) - before < MOST_MEMORY
    assert victim.run(honest.call_until_it_succeeds, "w1", operator.add, 1, 2) == 3
    assert victim.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(victim, member)
