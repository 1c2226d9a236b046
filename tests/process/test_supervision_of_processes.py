"""Supervised objects, in processes that are killed: the owner, the supervisor, and both."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from crew import PATIENCE, Crew, Member, join

import farcall
from farcall import rpc
from farcall.runtime.current import current_agent
from farcall.supervision.handlers import supervisors_of

_kept: dict[str, Any] = {}


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def pid(self) -> int:
        return os.getpid()


# Steps.


def supervise(on: str, **how: Any) -> None:
    rpc.supervise(Counter, (5,), on=on, name="counter", snapshot=0.1, concurrency=1, **how)


def follow() -> None:
    _kept["follower"] = rpc.get_object("counter", follow=True)


def add(by: int = 1) -> tuple[int, str]:
    follower = _kept["follower"]
    total = follower.rpc_sync(retry=rpc.Retry(8, 0.1)).add(by)
    return total, follower.owner_name()


def wait_for_snapshot(count: int) -> None:
    """Wait until this worker keeps a snapshot with this count."""
    supervisors = supervisors_of(current_agent())
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        state = supervisors.state_of("counter")
        found = None if state is None else supervisors.snapshots.get(state.key, 0)
        if found is not None and found[1].count == count:
            return
        pause.wait(0.05)
    raise AssertionError("no such snapshot came")


def wait_for(*names: str) -> None:
    rpc.wait_for(*names, timeout=PATIENCE)


def open_group(crew: Crew, *names: str) -> list[Member]:
    members = [crew.member(name) for name in names]
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, None, crew.init_method, role="worker")
    for member in members:
        member.result()
    for member in members:
        member.run(wait_for, *names)
    return members


def has_plan() -> bool:
    """Return whether this worker could supervise."""
    known = supervisors_of(current_agent())._known.values()
    return any(one.plan is not None for one in known)


def wait_for_plan() -> None:
    """Wait until this worker could supervise."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if has_plan():
            return
        pause.wait(0.01)
    raise AssertionError("no plan came")


def fail_to_adopt(times: int) -> None:
    """Have this worker fail as if it had not met an owner, so many times."""
    supervisors = supervisors_of(current_agent())
    adopt, left = supervisors.adopt, [None] * times

    def adopt_later(*args: Any) -> Any:
        if left:
            left.pop()
            raise rpc.OwnerDied("w9", "it has not been met")
        return adopt(*args)

    supervisors.adopt = adopt_later  # type: ignore[method-assign]


DEATHS = {"owner": ("w1",), "supervisor": ("w0",), "both": ("w0", "w1")}


@pytest.mark.parametrize("kind", ["fixed", "open"])
@pytest.mark.parametrize("who", DEATHS)
def test_sigkill_loses_only_changes_after_the_snapshot(crew: Crew, who: str, kind: str) -> None:
    names = ("w0", "w1", "w2", "w3")
    members = crew.group(4) if kind == "fixed" else open_group(crew, *names)
    by_name = dict(zip(names, members, strict=True))
    by_name["w0"].run(supervise, "w1", wait=0.0)
    by_name["w3"].run(follow)
    assert by_name["w3"].run(add, 2) == (7, "w1")
    by_name["w2"].run(wait_for_snapshot, 7)
    for name in DEATHS[who]:
        by_name[name].kill()
    total, owner = by_name["w3"].run(add)
    assert total == 8
    assert (owner == "w1") == (who == "supervisor")
    if who == "supervisor":  # the one that supervises now does all that the first did
        by_name["w2"].run(wait_for_snapshot, 8)
        by_name["w1"].kill()
        assert by_name["w3"].run(add)[0] == 9


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_sigkill_of_the_supervisor_right_after_the_start_loses_no_object(
    crew: Crew, failures: int
) -> None:
    w0, w1, w2 = crew.group(3)
    for other in (w1, w2):
        other.run(fail_to_adopt, failures)
    w0.run(supervise, "w0")
    w0.kill()  # the owner dies, too
    for other in (w1, w2):
        other.run(follow)
        assert other.run(add)[1] in ("w1", "w2")


def test_supervisor_that_is_alone_starts_and_hands_the_plan_to_the_first_newcomer(
    crew: Crew,
) -> None:
    (w0,) = open_group(crew, "w0")
    w0.run(supervise, "w0", wait=0.0)
    assert w0.run(has_plan)
    w1 = crew.member("w1")
    w1.run(join, "w1", 1, None, crew.init_method, role="worker")
    w1.run(wait_for_plan)
    w0.kill()
    w1.run(follow)
    assert w1.run(add) == (6, "w1")


def test_object_is_made_again_on_the_restarted_worker_of_the_same_name(crew: Crew) -> None:
    w0, w1, w2 = open_group(crew, "w0", "w1", "w2")
    w0.run(supervise, "w1", wait=PATIENCE)
    w2.run(follow)
    assert w2.run(add, 2) == (7, "w1")
    w0.run(wait_for_snapshot, 7)
    w1.kill()
    again = crew.member("w1")
    again.run(join, "w1", 1, None, crew.init_method, role="worker")
    assert w2.run(add) == (8, "w1")
    again.run(follow)  # the newcomer knows of it, too
    assert again.run(add) == (9, "w1")


def test_workers_of_a_role_stand_in_for_each_other_and_newcomers_are_waited_for(
    crew: Crew,
) -> None:
    (w0,) = open_group(crew, "w0")
    ps0 = crew.member("ps0")
    ps0.run(join, "ps0", -1, None, crew.init_method, role="ps")
    w0.run(wait_for, "ps0")
    w0.run(supervise, "ps")
    w0.run(follow)
    assert w0.run(add, 2) == (7, "ps0")
    w0.run(wait_for_snapshot, 7)
    ps0.kill()
    w0.start(add)  # no worker of the role is left: this waits
    ps1 = crew.member("ps1")
    ps1.run(join, "ps1", -1, None, crew.init_method, role="ps")
    assert w0.result() == (8, "ps1")


def test_worker_of_a_local_group_that_dies_is_replaced_by_another() -> None:
    with farcall.local(2) as group:
        counter = rpc.supervise(Counter, (5,), on="worker0", follow=True)
        pid = counter.rpc_sync().pid()
        os.kill(pid, signal.SIGKILL)
        assert counter.rpc_sync(retry=rpc.Retry(8, 0.1)).add() == 6
        assert counter.owner_name() == "worker1"
        assert group[1].call(os.getpid) == counter.rpc_sync().pid()
