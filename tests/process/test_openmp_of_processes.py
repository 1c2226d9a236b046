"""Two workers that compute with several OpenMP threads and call each other often."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from crew import PATIENCE, Crew, join, leave_all

from farcall import rpc
from farcall.runtime.threads.openmp import find_libgomp
from farcall.transport.spin import spare_cores

CALLS = 20  # between two looks

pytestmark = pytest.mark.skipif(
    find_libgomp() is None or spare_cores() == 0,
    reason="needs torch over libgomp, and two cores",
)


def use_all_cores() -> None:
    torch.set_num_threads(spare_cores() + 1)


def idle_teams() -> int:
    """Return how many this process has."""
    return sum(one.name.startswith("farcall-openmp-") for one in threading.enumerate())


def call_until(here: int, there: int) -> tuple[int, int]:
    """Call the other worker until both have so many idle teams, or patience is at its end."""
    deadline = time.monotonic() + PATIENCE
    while True:
        for _ in range(CALLS):
            found = idle_teams(), rpc.rpc_sync("w1", idle_teams)
        if found == (here, there) or time.monotonic() > deadline:
            return found


def wait_until_none() -> int:
    deadline = time.monotonic() + PATIENCE
    while idle_teams() and time.monotonic() < deadline:
        time.sleep(0.01)
    return idle_teams()


def test_both_have_an_idle_team_while_calls_are_frequent(crew: Crew) -> None:
    members = crew.group(2)
    for member in members:
        member.run(use_all_cores)
    assert members[0].run(call_until, 1, 1) == (1, 1)
    for member in members:
        assert member.run(wait_until_none) == 0
    assert members[0].run(call_until, 1, 1) == (1, 1)
    leave_all(*members)
    for member in members:
        assert member.run(idle_teams) == 0


def most(calls: int) -> int:
    """Call the other worker so often: the most idle teams that either had."""
    return max(max(idle_teams(), rpc.rpc_sync("w1", idle_teams)) for _ in range(calls))


def test_none_has_if_the_user_says_so(crew: Crew) -> None:
    members = crew.group(2, limit_openmp_spin=False)
    for member in members:
        member.run(use_all_cores)
    assert members[0].run(most, 20 * CALLS) == 0
    leave_all(*members)


def test_none_has_with_one_thread(crew: Crew) -> None:
    members = crew.members(2)
    for rank, member in enumerate(members):
        member.run(torch.set_num_threads, 1)  # first: calls are frequent while workers meet, too
        member.start(join, member.name, rank, 2, crew.init_method)
    for member in members:
        member.result()
    assert members[0].run(most, 20 * CALLS) == 0
    leave_all(*members)
