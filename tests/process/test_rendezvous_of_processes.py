"""`init_rpc` between processes: every way to meet, and every way not to."""

from __future__ import annotations

import operator
import os

import pytest
from crew import Crew, Member, call, join, leave, leave_all
from launching import free_port
from patience import PATIENCE
from torch.distributed import TCPStore

from farcall import rpc
from farcall.errors import DuplicateWorker, RendezvousError, RendezvousTimeout


def check_all_reach_all(members: list[Member]) -> None:
    for member in members:
        for other in members:
            assert member.run(call, other.name, operator.add, 1, 2) == 3
    leave_all(*members)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_workers_meet_at_a_url(crew: Crew, scheme: str) -> None:
    url = crew.init_method if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    members = crew.members(3)
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, 3, url)
    for member in members:
        member.result()
    check_all_reach_all(members)


def test_environment_says_where_and_who(crew: Crew) -> None:
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    members = [crew.member(RANK=str(rank), **common) for rank in range(3)]
    for member in members:
        member.start(join, member.name, -1, None)
    for member in members:
        member.result()
    check_all_reach_all(members)


def test_store_of_a_torchrun_agent_is_used(crew: Crew) -> None:
    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    members = [crew.member(RANK=str(rank), **common) for rank in range(2)]
    for member in members:
        member.start(join, member.name, -1, None)
    for member in members:
        member.result()
    check_all_reach_all(members)


def test_timeout_names_the_missing_ranks(crew: Crew) -> None:
    members = crew.members(2)
    timeout = 0.5
    while True:
        url = f"{crew.init_method}-{timeout}"
        for member, rank in zip(members, (0, 2), strict=True):
            member.start(join, member.name, rank, 4, url, rpc_timeout=timeout)
        errors = [member.fails() for member in members]
        if all(name in str(error) for name in ("w0 ", "w1 ") for error in errors):
            break
        timeout *= 2  # one had given up before the other came: the machine is busy
        assert timeout < PATIENCE, errors
    for error in errors:
        assert type(error) is RendezvousTimeout
        assert "missing: rank 1, rank 3" in str(error)
        assert "w0 (rank 0), w1 (rank 2)" in str(error)
    # Nothing is left of the attempt: the same processes may try again elsewhere.
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, 2, crew.init_method + "-again")
    for member in members:
        member.result()
    check_all_reach_all(members)


def test_duplicate_name_is_refused_to_all(crew: Crew) -> None:
    members = crew.members(3)
    for rank, member in enumerate(members):
        name = "same" if rank else "w0"
        member.start(join, name, rank, 3, crew.init_method)
    errors = [member.fails() for member in members]
    assert type(errors[0]) is RendezvousError
    assert {type(error) for error in errors[1:]} == {RendezvousError, DuplicateWorker}
    for error in errors:
        assert "the name 'same' is not unique" in str(error)


def test_protected_mode_refuses_an_open_port_without_a_secret(crew: Crew) -> None:
    alone = crew.member()
    alone.start(join, "alone", 0, 1, crew.init_method, listen="0.0.0.0")
    error = alone.fails()
    assert isinstance(error, ValueError)
    assert "farcall refuses to listen on 0.0.0.0 without authentication" in str(error)
    assert "FARCALL_SECRET" in str(error)


def test_second_init_is_refused_and_the_first_goes_on(crew: Crew) -> None:
    (alone,) = crew.group(1)
    alone.start(join, "again", 0, 1, crew.init_method)
    assert "already initialized" in str(alone.fails())
    assert alone.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(alone)
    alone.start(call, "w0", operator.add, 1, 2)
    assert "init_rpc" in str(alone.fails())


def test_group_meets_and_leaves_again_and_again_in_the_same_processes(crew: Crew) -> None:
    members = crew.members(2)
    url = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(5):
        for rank, member in enumerate(members):
            member.start(join, member.name, rank, 2, url)
        for member in members:
            member.result()
        check_all_reach_all(members)
    assert members[0].run(count_descriptors) <= 60


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Workers that come and go.


def known_id(name: str) -> int:
    return rpc.get_worker_info(name).id


def test_workers_join_leave_and_return_under_the_same_name(crew: Crew) -> None:
    hub, guest, second = crew.members(3)
    # The hub hosts no store: the store is a file, and ids are assigned.
    hub.run(join, "hub", -1, None, crew.init_method)
    guest.run(join, "guest", -1, None, crew.init_method)
    assert hub.run(call, "guest", os.getpid) == guest.process.pid
    assert guest.run(call, "hub", os.getpid) == hub.process.pid
    first_id = hub.run(known_id, "guest")
    guest.run(leave)
    hub.start(call, "guest", os.getpid)
    assert isinstance(hub.fails(), (rpc.PeerLost, ValueError))
    second.run(join, "guest", -1, None, crew.init_method)
    assert hub.run(call, "guest", os.getpid) == second.process.pid
    assert second.run(call, "hub", os.getpid) == hub.process.pid
    assert hub.run(known_id, "guest") == first_id
    guest.run(join, "other", -1, None, crew.init_method)
    assert guest.run(call, "guest", os.getpid) == second.process.pid
    leave_all(hub, guest, second)


def test_name_of_a_live_worker_is_refused_to_a_newcomer(crew: Crew) -> None:
    hub, other = crew.members(2)
    hub.run(join, "hub", -1, None, crew.init_method)
    other.start(join, "hub", -1, None, crew.init_method)
    assert type(other.fails()) is DuplicateWorker
    other.run(join, "free", -1, None, crew.init_method)
    assert other.run(call, "hub", os.getpid) == hub.process.pid
    leave_all(hub, other)


def test_name_of_a_crashed_worker_may_be_taken_over(crew: Crew) -> None:
    hub, first, second = crew.members(3)
    hub.run(join, "hub", -1, None, crew.init_method)
    first.run(join, "guest", -1, None, crew.init_method)
    assert hub.run(call, "guest", os.getpid) == first.process.pid
    first.kill()
    second.run(join, "guest", -1, None, crew.init_method)
    assert second.run(call, "hub", os.getpid) == hub.process.pid
    assert hub.run(call, "guest", os.getpid) == second.process.pid
    leave_all(hub, second)


def test_name_may_be_taken_over_though_another_program_got_the_port(crew: Crew) -> None:
    """Let another program have the port of a process that has ended, as the system may do."""
    hub, first, second = crew.members(3)
    place = f"127.0.0.1:{free_port()}"
    hub.run(join, "hub", -1, None, crew.init_method)
    first.run(join, "guest", -1, None, crew.init_method, listen=place)
    first.kill()
    other = crew.member()
    other.run(join, "other", -1, None, crew.init_method, listen=place)
    second.run(join, "guest", -1, None, crew.init_method)
    assert hub.run(call, "guest", os.getpid) == second.process.pid
    assert hub.run(call, "other", os.getpid) == other.process.pid
    leave_all(hub, other, second)


def keep_for(owner: str) -> str:
    """Pass the newcomer's own reference to a worker that has never called it."""
    rref = rpc.RRef("the newcomer's")
    return rpc.rpc_sync(owner, use, args=(rref,))


def use(rref: rpc.RRef[str]) -> str:
    return rref.to_here()


def test_newcomer_that_calls_first_is_called_back(crew: Crew) -> None:
    hub, guest = crew.members(2)
    hub.run(join, "hub", -1, None, crew.init_method)
    guest.run(join, "guest", -1, None, crew.init_method)
    assert guest.run(keep_for, "hub") == "the newcomer's"
    assert hub.run(call, "guest", os.getpid) == guest.process.pid
    leave_all(hub, guest)


def test_no_worker_joins_at_will_where_a_fixed_group_lives(crew: Crew) -> None:
    first, second = crew.group(2)
    late = crew.member("late")
    late.start(join, "late", -1, None, crew.init_method)
    error = late.fails()
    assert type(error) is RendezvousError
    assert "RPC group mixes statically and dynamically initialized members" in str(error)
    leave_all(first, second)
    late.run(join, "late", -1, None, crew.init_method)
    leave_all(late)
