"""Another user of the machine, and another host, without a credential: nothing of theirs runs."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
from pathlib import Path

import attacker
import honest
import pytest
import stranger
from certificates import Authority
from clusters import patient_cluster
from crew import Crew, Member, call, join, leave_all
from networks import enter, network

from farcall import rpc
from farcall.testing.cluster import acting_as


def nobody(crew: Crew) -> Member:
    """Return a process of another user; of this one, if it may not become another."""
    process = crew.member("stranger")
    process.run(stranger.become_nobody)
    return process


def test_another_user_runs_nothing_on_a_worker_without_settings(
    crew: Crew, transport: str, trap: Path, tmp_path: Path
) -> None:
    first, second = honest.pair(crew, transport, environment=honest.alone(tmp_path))
    descriptors = second.run(honest.count_descriptors)
    threads = second.run(honest.count_threads)
    reachable = second.run(honest.urls)
    assert {url.partition(":")[0] for url in reachable} == {"unix", "tcp"}
    outcomes = nobody(crew).run(stranger.try_everything, str(trap), reachable)
    assert len(outcomes) == 4 * len(reachable)
    assert not trap.exists(), outcomes
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert second.run(honest.count_descriptors) <= descriptors + 8
    assert second.run(honest.count_threads) <= threads + 4
    leave_all(first, second)


def test_cves_of_torch_rpc_do_nothing(
    crew: Crew, transport: str, trap: Path, tmp_path: Path
) -> None:
    first, second = honest.pair(crew, transport, environment=honest.alone(tmp_path))
    # A `unix:` address would be refused for this test's own user: see above for another's.
    reachable = [url for url in second.run(honest.urls) if url.startswith("tcp:")]
    assert reachable
    for cve, make in attacker.CVES.items():
        for url in reachable:
            # A refusal, of whatever kind, is wanted.
            with contextlib.suppress(OSError, RuntimeError):
                session = attacker.enter(url, None)
                session.say(make(str(trap)))
                session.answer()
                session.hang_up()
        assert not trap.exists(), cve
        assert first.run(call, "w1", operator.add, 1, 2) == 3, cve
    leave_all(first, second)


def test_cves_are_real_for_a_member_without_a_policy(
    crew: Crew, transport: str, tmp_path: Path
) -> None:
    """Send the same frames, as the control, from a worker with the secret that has been let in."""
    environment = {"FARCALL_SECRET": honest.SECRET}
    first, second = honest.pair(crew, transport, environment=environment, listen="127.0.0.1")
    for cve, make in attacker.CVES.items():
        trap = tmp_path / f"sprung by {cve}"
        first.run(attacker.carry, "w1", make(str(trap)))
        assert trap.exists(), cve
    leave_all(first, second)


def test_another_host_runs_nothing_on_a_worker_without_settings(
    crew: Crew, transport: str, trap: Path, tmp_path: Path
) -> None:
    with network() as net:
        environment = {"FARCALL_TRANSPORTS": transport, **honest.alone(tmp_path)}
        victim = crew.member("w0", **environment)
        victim.run(enter, net.b)
        victim.run(join, "w0", 0, 1, crew.init_method)
        address = f"tcp://{net.addresses[net.b]}:{victim.run(honest.tcp_port)}"
        other = crew.member("stranger")
        other.run(enter, net.a)
        assert len(other.run(stranger.try_everything, str(trap), [address])) == 4
        assert not trap.exists()
        assert victim.run(call, "w0", operator.add, 1, 2) == 3


def test_another_host_without_the_secret_takes_no_more_than_its_budget(
    crew: Crew, transport: str, trap: Path
) -> None:
    with network() as net:
        environment = {"FARCALL_TRANSPORTS": transport, "FARCALL_SECRET": honest.SECRET}
        victim = crew.member("w0", **environment)
        victim.run(enter, net.b)
        host = net.addresses[net.b]
        victim.run(join, "w0", 0, 1, crew.init_method, listen=host)
        descriptors, threads = (
            victim.run(honest.count_descriptors),
            victim.run(honest.count_threads),
        )
        other = crew.member("stranger")
        other.run(enter, net.a)
        address = f"tcp://{host}:{victim.run(honest.tcp_port)}"
        for _ in range(10):
            outcomes = other.run(stranger.try_everything, str(trap), [address])
            assert "ConnectionRefusedError" not in {how for *_, how in outcomes}
        assert not trap.exists()
        assert victim.run(honest.count_descriptors) <= descriptors + 8
        assert victim.run(honest.count_threads) <= threads + 4
        assert victim.run(call, "w0", operator.add, 1, 2) == 3


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_stranger_without_the_secret_gets_no_further_than_the_handshake(
    crew: Crew, transport: str, trap: Path, path: str
) -> None:
    environment = {"FARCALL_SECRET": honest.SECRET}
    first, second = honest.pair(crew, transport, environment=environment, listen="127.0.0.1")
    (url,) = [url for url in second.run(honest.urls) if url.startswith(path)]
    for secret in (None, honest.OTHER_SECRET):
        with pytest.raises(RuntimeError, match=r"secret|SECRET"):
            attacker.enter(url, secret)
    assert not trap.exists()
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(first, second)


def test_stranger_without_a_certificate_gets_no_further_than_the_handshake(
    crew: Crew, transport: str, trap: Path, tmp_path: Path
) -> None:
    tls = Authority(tmp_path).issue("worker").config()
    first, second = honest.pair(crew, transport, listen="127.0.0.1", tls=tls)
    (url,) = [url for url in second.run(honest.urls) if url.startswith("tcp:")]
    nobody(crew).run(stranger.try_everything, str(trap), [url])
    for secret in (None, honest.SECRET):
        with pytest.raises((RuntimeError, OSError)):
            attacker.enter(url, secret)
    assert not trap.exists()
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(first, second)


def test_insecure_protects_from_no_stranger(crew: Crew, transport: str, trap: Path) -> None:
    """Show as the control that `insecure=True` lets in all that every other setting keeps out."""
    worker = crew.member("w0", FARCALL_TRANSPORTS=transport)
    worker.run(join, "w0", 0, 0, crew.init_method, insecure=True, listen="127.0.0.1")
    (url,) = [url for url in worker.run(honest.urls) if url.startswith("tcp:")]
    nobody(crew).run(stranger.try_everything, str(trap), [url])
    assert worker.run(honest.wait_for, str(trap))  # the stranger was gone before it ran
    assert trap.exists()


def test_cluster_in_one_process_opens_no_sockets(crew: Crew) -> None:
    assert crew.member("w0").run(sockets_of_a_cluster) == 0


def sockets_of_a_cluster() -> int:
    """Return how many sockets a cluster has; torch and the crew have some of their own."""

    def count() -> int:
        paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(
            os.readlink(path).startswith("socket:") for path in paths if os.path.lexists(path)
        )

    before = count()
    with patient_cluster(2) as workers, acting_as(workers[0]):
        assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
        return count() - before


def test_the_bytes_of_a_stranger_are_a_pickle_that_would_run(trap: Path) -> None:
    """Show as the control that the traps themselves work."""
    pickle.loads(pickle.dumps(attacker.Trap(str(trap))))
    assert trap.exists()
