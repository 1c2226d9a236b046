"""Another user of the machine, and another host, without a credential: nothing of theirs runs."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import pickle
import subprocess
import sys
from pathlib import Path

import attacker
import honest
import pytest
from crew import Crew, call, join, leave_all
from networks import enter, network
from patience import PATIENCE

NOBODY = 65534
STRANGER = Path(__file__).parent / "stranger.py"


def as_nobody(arguments: list[str], *, host: str = "") -> list[list[object]]:
    """Run `stranger.py` as another user, if this one may become another."""
    prefix = ["ip", "netns", "exec", host] if host else []
    user = {} if os.geteuid() or host else {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    done = subprocess.run(
        [*prefix, sys.executable, "-B", str(STRANGER), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        **user,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[list[object]] = json.loads(done.stdout)
    return outcomes


def test_another_user_runs_nothing_on_a_worker_without_settings(
    crew: Crew, transport: str, trap: Path, tmp_path: Path
) -> None:
    first, second = honest.pair(crew, transport, environment=honest.alone(tmp_path))
    descriptors = second.run(honest.count_descriptors)
    threads = second.run(honest.count_threads)
    reachable = second.run(honest.urls)
    assert {url.partition(":")[0] for url in reachable} == {"unix", "tcp"}
    outcomes = as_nobody([str(trap), *reachable])
    assert len(outcomes) == 4 * len(reachable)
    assert not trap.exists(), outcomes
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert second.run(honest.count_descriptors) <= descriptors + 8
    assert second.run(honest.count_threads) <= threads + 4
    leave_all(first, second)


@pytest.mark.parametrize("cve", attacker.CVES)
def test_cves_of_torch_rpc_do_nothing(
    crew: Crew, transport: str, trap: Path, tmp_path: Path, cve: str
) -> None:
    first, second = honest.pair(crew, transport, environment=honest.alone(tmp_path))
    for url in second.run(honest.urls):
        if not url.startswith("tcp:"):
            continue  # it would be refused for this test's own user: see above for another's
        # The refusal, of whatever kind, is what is wanted.
        with contextlib.suppress(OSError, RuntimeError):
            session = attacker.enter(url, None)
            session.say(attacker.CVES[cve](str(trap)))
            session.answer()
            session.hang_up()
    assert not trap.exists()
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    leave_all(first, second)


@pytest.mark.parametrize("cve", attacker.CVES)
def test_cves_are_real_for_a_member_without_a_policy(
    crew: Crew, transport: str, trap: Path, cve: str
) -> None:
    """The control: the same frames, from who has the secret and has been let in."""
    environment = {"FARCALL_SECRET": honest.SECRET}
    first, second = honest.pair(crew, transport, environment=environment, listen="127.0.0.1")
    frame = attacker.CVES[cve](str(trap))
    first.run(attacker.carry, "w1", frame)
    assert trap.exists()
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
        assert len(as_nobody([str(trap), address], host=net.a)) == 4
        assert not trap.exists()
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


def test_what_a_stranger_sends_is_a_pickle_that_would_run(trap: Path) -> None:
    """The control of the traps themselves."""
    pickle.loads(pickle.dumps(attacker.Trap(str(trap))))
    assert trap.exists()
