"""Whole workers on a simulated operating system keep what they promise, and mistakes are found.

Few schedules run here, since each takes a tenth of a second or more: `make sim WORKERS=1000` runs
many.
"""

from __future__ import annotations

import functools
import threading
import time

import pytest
from simulator.agents import AgentBug, simulate_agents
from simulator.agents.planted import planted
from simulator.schedule import Result
from simulator.system.installing import System, installed
from simulator.system.scheduler import Process, SimThread, Stuck

from farcall.transport import waiter
from farcall.transport.connect import connections

SCHEDULES = 12
SEARCHED = 60  # schedules in which a planted mistake has to be found
# Those that most schedules show. `make sim` looks for the others.
OFTEN = [
    AgentBug.ASKS_STORE_ITSELF,
    AgentBug.VALUES_ARE_DROPPED_SOMETIMES,
    AgentBug.FORGETS_HANDLES,
    AgentBug.LEAVES_FOLLOWERS_ASLEEP,
    AgentBug.LEAVES_SOCKETS_OPEN,
]


@functools.cache
def first_run(seed: int) -> Result:
    """Return what a schedule comes to; two tests look at it."""
    return simulate_agents(seed)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_workers_keep_their_promises(seed):
    assert first_run(seed).violations == ()


def test_schedule_is_the_same_each_time():
    for seed in range(3):
        first, second = ([str(e) for e in run(seed).log] for run in (first_run, simulate_agents))
        assert first == second


@pytest.mark.parametrize("bug", OFTEN, ids=lambda bug: bug.value)
def test_mistake_is_found(bug):
    assert any(simulate_agents(seed, bug=bug).violations for seed in range(SEARCHED))


@pytest.mark.parametrize("bug", AgentBug, ids=lambda bug: bug.value)
def test_the_code_that_a_mistake_changes_has_that_name(bug):
    with planted(bug):
        pass


# The system itself.


def run(program, *, seed: int = 0, preempts: float = 0.0) -> System:
    """Run a program as the first thread of a process, on a system of one host."""
    system = System(seed, preempts, slowest=0.01)
    process = Process("p", system.network.add_host("h"))

    def main() -> None:
        try:
            program(system)
        finally:
            system.scheduler.finish()

    with installed(system):
        process.main = SimThread(system.scheduler, process, main, "main")
        system.scheduler.start(process.main)
        system.scheduler.run(20.0)
    assert system.scheduler.failures == []
    return system


def test_an_hour_takes_no_time():
    assert run(lambda system: connections.time.sleep(3600.0)).scheduler.now == 3600.0


def test_modules_have_the_real_system_again_afterwards():
    run(lambda system: None)
    assert connections.threading is threading
    assert connections.time is time


def test_nothing_can_happen_any_more():
    with pytest.raises(Stuck, match="nothing can happen any more"):
        run(lambda system: connections.threading.Event().wait())


def test_frames_sent_over_a_cut_network_arrive_when_it_is_back():
    arrived = []

    def program(system: System) -> None:
        here, there = system.network.add_host("a"), system.network.add_host("b")
        system.network.cut(here, there, 10.0)
        system.network.carry(here, there, lambda: arrived.append(system.scheduler.now))
        system.scheduler.sleep(20.0)

    run(program)
    assert len(arrived) == 1
    assert 10.0 <= arrived[0] <= 13.1


def test_sockets_of_one_process_reach_each_other():
    def program(system: System) -> None:
        sockets = connections.socket
        listener = sockets.create_server(("", 0))
        with sockets.socket() as client:
            client.connect(listener.getsockname())
            server, _ = listener.accept()
            client.sendall(b"ping")
            assert server.recv(100) == b"ping"
            client.shutdown(sockets.SHUT_WR)
            assert server.recv(100) == b""
            server.close()
        listener.close()

    run(program)


def test_a_host_that_is_dark_is_not_reached_in_time():
    def program(system: System) -> None:
        sockets, me = connections.socket, system.scheduler.current()
        other = system.network.add_host("other")
        system.network.darken(other, 10_000.0)
        assert me is not None
        with sockets.socket() as client:
            client.settimeout(500.0)
            with pytest.raises(TimeoutError):
                client.connect((other.address, 1))
        assert 100.0 <= system.scheduler.now < 500.1  # the kernel gives up

    run(program)


def test_threads_that_are_preempted_keep_a_lock():
    counts = []

    def program(system: System) -> None:
        lock, count = waiter.threading.Lock(), [0]

        def add() -> None:
            for _ in range(50):
                with lock:
                    before = count[0]
                    system.scheduler.may_switch()
                    count[0] = before + 1

        made = [system.threading.FarcallThread(add, f"add{n}") for n in range(4)]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()
        counts.append(count[0])

    run(program, preempts=0.5)
    assert counts == [200]
