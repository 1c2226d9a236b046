"""Many workers of one host, each of which calls every other: memory, descriptors, and no deaths.

Memory is counted as the kernel counts it: a page that two processes have mapped counts as half a
page in each (Pss), so the sum over all workers is what the host has given.
"""

from __future__ import annotations

import operator
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import crew as crews
import pytest
import torch
from crew import Crew, Member, leave_all

from farcall import rpc
from farcall.runtime.current import current_agent

pytestmark = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

GIB = 1 << 30
# A mapping's first line, and behind it lines with a key each.
OUR_MEMORY = r"memfd:farcall.*\n(?:\w+: .*\n)*?Pss: +(\d+) kB"
PATIENCE = 800.0  # a hundred processes share the cores, and have the least priority


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "PATIENCE", PATIENCE)


class Used(NamedTuple):
    shared: int
    descriptors: int
    paths: list[str]


def used() -> Used:
    """Return this process's part of the shared memory, its descriptors and its links. A step."""
    ours = re.findall(OUR_MEMORY, Path("/proc/self/smaps").read_text())
    shared = 1024 * sum(map(int, ours))
    paths = [link.description.split()[0] for link in current_agent().endpoint.links()]
    return Used(shared, len(os.listdir("/proc/self/fd")), paths)


def call_everybody(me: int, count: int, size: int) -> list[int]:
    """Call all others at once, and return the workers whose answer was wrong. A step."""
    others = [(me + step) % count for step in range(1, count)]
    tensor = torch.full((size,), float(me))
    futures = {
        other: rpc.rpc_async(f"w{other}", operator.add, args=(tensor, other), timeout=PATIENCE)
        for other in others
    }
    return [
        other for other, future in futures.items() if not torch.equal(future.wait(), tensor + other)
    ]


def run_all(members: list[Member], step: Any, *args: Any) -> list[Any]:
    for rank, member in enumerate(members):
        member.start(step, rank, *args)
    return [member.result() for member in members]


@pytest.mark.timeout(900)
def test_a_hundred_workers_call_each_other(crew: Crew) -> None:
    count = 100
    members = crew.group(count, rpc_timeout=PATIENCE)
    for _ in range(2):
        assert run_all(members, call_everybody, count, 4) == [[]] * count
    uses = [member.run(used) for member in members]
    assert all(path == "shm" for use in uses for path in use.paths)
    assert all(len(use.paths) == 2 * (count - 1) for use in uses)  # no link was lost
    assert 0 < sum(use.shared for use in uses) <= GIB
    assert max(use.descriptors for use in uses) <= 300
    leave_all(*members)


@pytest.mark.timeout(900)
def test_workers_with_little_shared_memory_go_over_sockets(crew: Crew) -> None:
    count, budget = 8, 200_000
    members = crew.group(count, rpc_timeout=PATIENCE, shared_memory=budget)
    for size in (4, 300_000, 4):
        assert run_all(members, call_everybody, count, size) == [[]] * count
        uses = [member.run(used) for member in members]
        assert {path for use in uses for path in use.paths} == {"shm", "unix"}
        assert sum(use.shared for use in uses) <= count * budget
    leave_all(*members)


@pytest.mark.timeout(900)
def test_workers_without_shared_memory_use_sockets(crew: Crew) -> None:
    members = crew.group(2, shared_memory=0)
    assert run_all(members, call_everybody, 2, 300_000) == [[]] * 2
    assert {path for member in members for path in member.run(used).paths} == {"unix"}
    leave_all(*members)
