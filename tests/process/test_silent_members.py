"""Graceful shutdown waits for a worker that is busy, and not for one that says nothing."""

from __future__ import annotations

import operator
import signal
import time

import pytest
from crew import Crew, call, check_all_left, leave_all

from farcall import rpc

BOUND = 2.0  # seconds


def leave() -> None:
    rpc.shutdown(timeout=0)


def busy_for(seconds: float) -> None:
    time.sleep(seconds)
    rpc.shutdown(timeout=0)


def ask_without_end(to: str) -> None:
    rpc.rpc_async(to, operator.add, args=(1, 2), timeout=0)


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("transport", ["native", "socket"])
def test_a_stopped_member_does_not_hold_up_the_others(  # DEP-4
    crew: Crew, stopped: int, linked: bool, transport: str
) -> None:
    members = crew.group(3, transports=(transport,), dead_host_timeout=BOUND)
    if linked:
        for member in members:
            for name in ("w0", "w1", "w2"):
                assert member.run(call, name, operator.add, 1, 1) == 2
    members[stopped].stop()
    others = [member for rank, member in enumerate(members) if rank != stopped]
    for member in others:
        member.start(leave)
    for member in others:
        member.result()
    members[stopped].signal(signal.SIGCONT)


def test_a_call_without_end_to_a_stopped_worker_ends_in_shutdown(crew: Crew) -> None:
    caller, callee = crew.group(2, dead_host_timeout=BOUND)
    assert caller.run(call, "w1", operator.add, 1, 1) == 2
    callee.stop()
    caller.run(ask_without_end, "w1")
    caller.run(leave)
    callee.signal(signal.SIGCONT)


def test_a_member_that_is_busy_is_waited_for(crew: Crew) -> None:  # DEP-3
    members = crew.group(3, dead_host_timeout=BOUND)
    members[1].start(busy_for, 3 * BOUND)
    leave_all(members[0], members[2])
    members[1].result()
    check_all_left(*members)
