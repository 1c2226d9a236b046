"""A member that announces more than it brings: memory is taken as data arrives."""

from __future__ import annotations

import contextlib
import operator
import os

import attacker
import honest
import pytest
import torch
from crew import Crew, call, leave_all

from farcall import rpc

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


ANNOUNCED = {
    "60,000 of 40 KB": (60_000, 40_000),
    "60,000 of 1 MiB": (60_000, 1 << 20),
    "one of 512 GiB": (1, 1 << 39),
    "2^20 of 64 bytes": (1 << 20, 64),
}


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_announced_buffers_take_no_memory(crew: Crew, transport: str, path: str) -> None:
    environment = {"FARCALL_SECRET": honest.SECRET}
    victim, member = honest.pair(crew, transport, environment=environment, listen="127.0.0.1")
    (url,) = [url for url in victim.run(honest.urls) if url.startswith(path)]
    before = victim.run(honest.reset_peak)
    for announced, (buffers, size) in ANNOUNCED.items():
        frame = attacker.announcing(buffers, size)
        member.run(send_and_hang_up, url, honest.SECRET, frame)
        assert victim.run(honest.peak_bytes) - before < MOST_MEMORY, announced
        assert victim.run(honest.call_until_it_succeeds, "w1", operator.add, 1, 2) == 3
        assert victim.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(victim, member)


# Shared memory: what its sender still can do to it.

ELEMENTS = 1 << 20  # far more than goes through a ring

_kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    _kept.append(tensor)


def total_of_kept() -> float:
    return sum(float(tensor.sum()) for tensor in _kept)


def share_and_cut_off(to: str) -> float:
    """Have a worker keep a tensor that torch shares, make its file empty, and have it read."""
    tensor = torch.ones(ELEMENTS).share_memory_()
    descriptor, _ = tensor.untyped_storage()._share_fd_cpu_()
    call(to, keep, tensor)
    os.ftruncate(descriptor, 0)
    return float(call(to, total_of_kept))


def send_and_punch_holes(to: str) -> int:
    call(to, keep, torch.ones(ELEMENTS))
    return attacker.punch_holes(4 * ELEMENTS)


def test_shared_tensor_that_is_cut_off_kills_no_worker_with_a_policy(
    crew: Crew, transport: str
) -> None:
    options = {"policy": rpc.Only([keep, total_of_kept]), "shared_tensors": "handle"}
    member, victim = honest.pair(crew, transport, **options)
    assert member.run(share_and_cut_off, "w1") == ELEMENTS
    leave_all(member, victim)


def test_shared_tensor_that_is_cut_off_kills_a_worker_without_a_policy(crew: Crew) -> None:
    """Show as the control that one cut tensor kills a worker, as the guide says of the option."""
    pytest.importorskip("farcall._native")
    member, _ = honest.pair(crew, "native", shared_tensors="handle")
    member.start(share_and_cut_off, "w1")
    assert isinstance(member.fails(), rpc.PeerLost)


def test_holes_in_a_segment_are_zeros_and_kill_no_process(crew: Crew) -> None:
    pytest.importorskip("farcall._native")
    member, victim = honest.pair(crew, "native")
    assert member.run(send_and_punch_holes, "w1") > 0
    assert victim.run(total_of_kept) == 0.0
    assert member.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(member, victim)
