"""Groups of `farcall.ray.start` on a cluster of two nodes: used, refused, killed, and as scripts.

All tests share one cluster, since its start takes seconds of a core.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from known_secrets import SECRET
from patience import PATIENCE
from ray_nodes import two_nodes
from ray_scripts import PROGRAMS, run, run_until_shown, said_by_workers

import farcall
from farcall import autograd, errors, rpc
from farcall.groups import Group
from farcall.runtime.current import current_agent

ray = pytest.importorskip("ray")
SMALL = {"CPU": 0.1}


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def assigned() -> dict[str, float]:
    return dict(ray.get_runtime_context().get_assigned_resources())


def double_by_ray(number: int) -> int:
    """Uses Ray within a worker of farcall."""
    return int(ray.get(ray.remote(num_cpus=0)(lambda: 2 * number).remote()))


def addresses() -> tuple[str, ...]:
    return current_agent().me.addresses


def environment_and_command() -> bytes:
    return Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()


class Unloadable(str):
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return int, ("no number",)


def my_name() -> str:
    return rpc.get_worker_info().name


def node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def say(text: str) -> None:
    print(text)
    print("on stderr", file=sys.stderr)


def end(code: int) -> None:
    os._exit(code)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def start_there() -> str:
    with farcall.ray.start(1, resources=SMALL) as group:
        return group[0].call(my_name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        ray.init(made.address, log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()


@pytest.fixture(scope="class")
def shared(cluster: Any) -> Iterator[Group]:
    with farcall.ray.start(3, resources=SMALL, strategy="SPREAD", secret=SECRET) as made:
        yield made


class TestSharedGroup:
    """A group is used by several tests, and then closed: this process can have one at a time."""

    def test_a_worker_is_called(self, shared: Group) -> None:
        assert shared[0].call(max, 1, 2) == 2
        assert shared[1].call(sorted, [1, 2], reverse=True) == [2, 1]
        assert shared["worker2"].call_async(my_name).wait() == "worker2"

    def test_an_object_lives_on_a_worker(self, shared: Group) -> None:
        counter = shared[1].remote(Counter, 5)
        assert counter.owner_name() == "worker1"
        assert [counter.rpc_sync().add(1), counter.rpc_sync().add(2)] == [6, 8]

    def test_all_and_map(self, shared: Group) -> None:
        assert shared.all.call(my_name) == ["worker0", "worker1", "worker2"]
        assert shared.map(abs, range(0, -20, -1)) == list(range(20))

    def test_workers_call_each_other_and_the_driver(self, shared: Group) -> None:
        assert shared[0].call(rpc.rpc_sync, "worker1", my_name) == "worker1"
        assert shared[2].call(rpc.rpc_sync, "main", my_name) == "main"

    def test_gradients_flow_through_workers(self, shared: Group) -> None:
        with autograd.context() as context:
            x = torch.ones(3, requires_grad=True)
            autograd.backward(context, [shared[1].call(torch.mul, x, 4).sum()])
            assert torch.equal(autograd.get_gradients(context)[x], torch.full((3,), 4.0))

    def test_workers_are_on_both_nodes_with_the_resources_that_they_asked_for(
        self, shared: Group
    ) -> None:
        assert len(set(shared.all.call(node))) == 2
        assert shared.all.call(assigned) == [SMALL] * 3

    def test_ray_can_be_used_in_workers(self, shared: Group) -> None:
        assert shared[0].call(double_by_ray, 4) == 8

    def test_workers_listen_at_the_addresses_of_their_nodes(self, shared: Group) -> None:
        known = {one["NodeManagerAddress"] for one in ray.nodes()}
        for found in [addresses(), *shared.all.call(addresses)]:
            tcp = [url for url in found if url.startswith("tcp://")]
            assert tcp
            assert all(any(f"//{host}:" in url for host in known) for url in tcp), tcp

    def test_the_secret_is_in_no_environment_command_or_log(self, shared: Group) -> None:
        secret = SECRET.encode()
        for said in shared.all.call(environment_and_command):
            assert secret not in said
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        paths = (Path(folder, name) for folder, _, names in os.walk(session) for name in names)
        for path in paths:
            with suppress(FileNotFoundError):  # Ray has removed it since
                assert not path.is_file() or secret not in path.read_bytes(), path

    def test_a_second_group_is_refused(self, shared: Group) -> None:
        with pytest.raises(RuntimeError, match=r"has a group already.*group\.close"):
            farcall.ray.start(1)
        with pytest.raises(RuntimeError, match=r"farcall.ray.start\(\) starts workers from a dr"):
            shared[0].call(farcall.ray.start, 1)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n": 0}, ValueError, "n must be at least 1"),
    ({"n": 2, "names": ["a", "a"]}, ValueError, "names must differ"),
    ({"n": 1, "listen": "0.0.0.0"}, TypeError, r"farcall.ray.start\(\) takes no listen"),
    ({"n": 1, "num_worker_threads": 0}, ValueError, "num_worker_threads"),
    ({"n": 1, "strategy": "near"}, ValueError, "strategy must be one of"),
    ({"n": 1, "start_timeout": -1}, ValueError, "start_timeout must be"),
    ({"n": 1, "resources": {"num_gpus": 1}}, ValueError, "'num_gpus', which is called 'GPU'"),
    ({"n": 1, "resources": {}}, ValueError, "must name one at least"),
    ({"n": 1, "resources": {"CPU": -1}}, ValueError, "must not be negative"),
    ({"n": 1, "resources": {"CPU": "1"}}, TypeError, "must have numbers"),
    ({"n": 1, "resources": "CPU"}, TypeError, "a dict or a list of dicts, not str"),
    ({"n": 2, "resources": [{"CPU": 1}]}, ValueError, "resources must be 2"),
    ({"n": 1, "address": "127.0.0.1:1"}, RuntimeError, "connected to the cluster at .* already"),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), WRONG)
def test_errors_of_arguments_are_said(
    arguments: dict[str, Any], kind: type[Exception], text: str, cluster: Any
) -> None:
    with pytest.raises(kind, match=text):
        farcall.ray.start(**arguments)


def test_each_worker_is_where_its_resources_are(cluster: Any) -> None:
    wanted = [{"left": 1}, {"right": 1, "CPU": 0.1}]
    with farcall.ray.start(2, resources=wanted, names=["a", "b"]) as group:
        found = group.all.call(node)
    nodes = {one["NodeID"]: one["Resources"] for one in ray.nodes()}
    assert ["left" in nodes[one] for one in found] == [True, False]


def test_a_lost_worker_is_told_of_in_words(cluster: Any) -> None:
    with farcall.ray.start(3, resources=SMALL) as group:
        group.all.call(say, "first")
        assert group.logs(0) == "first\non stderr"
        with pytest.raises(errors.PeerLost, match=r"its process ended: killed .*Ray says: Worker"):
            group[0].call(end, 3)
        with pytest.raises(errors.PeerLost, match="its process ended: killed"):
            group[1].call_async(kill, signal.SIGKILL).wait()
        assert "Some common causes" not in str(group[0].ended)
        assert group[2].ended is None
        assert group.map(abs, [-1, -2]) == [1, 2]  # on the one that is left
        assert group.logs(0, last=1) == "on stderr"


def test_a_closed_group_has_given_everything_back(cluster: Any) -> None:
    with farcall.ray.start(1, resources={"CPU": 1}) as group:
        death = os.pidfd_open(group[0].call(os.getpid))
    assert select.select([death], [], [], PATIENCE)[0]
    os.close(death)
    with pytest.raises(errors.NotInitialized, match="this group is closed"):
        group[0].call(my_name)
    assert ray.is_initialized()
    everything = ray.util.placement_group([{"CPU": 2}, {"CPU": 2}])
    ray.get(everything.ready(), timeout=PATIENCE)
    ray.util.remove_placement_group(everything)


def test_a_cluster_without_room_says_so(cluster: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"Ray has no room for 3 workers.*'STRICT_SPREAD'.*'left'"
    ):
        farcall.ray.start(3, resources=SMALL, strategy="STRICT_SPREAD", start_timeout=0.5)
    with pytest.raises(errors.NotInitialized):
        rpc.get_worker_info()


def test_a_worker_that_can_not_start_says_why(cluster: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)'worker0' could not start: .*no number"):
        farcall.ray.start(1, resources=SMALL, role=Unloadable("any"))


def test_a_task_of_ray_can_start_a_group(cluster: Any) -> None:
    assert ray.get(ray.remote(num_cpus=0)(start_there).remote()) == "worker0"


def test_a_script_connects_shows_the_output_of_workers_and_disconnects(
    cluster: Any, tmp_path: Path
) -> None:
    lines = run_until_shown(
        tmp_path,
        """
        import ray
        import farcall

        class Counter:
            pass

        def greet(name):
            print("hello", name)
            return name

        with farcall.ray.start(1, resources={"CPU": 0.1}, rpc_timeout=100) as group:
            print(group[0].call(greet, "you"))
            print(type(group[0].remote(Counter).to_here()) is Counter, flush=True)
            input()
        print(ray.is_initialized())
        """,
        1,
        RAY_ADDRESS=cluster.address,
    )
    assert [line.strip() for line in lines if "pid=" not in line] == ["you", "True", "False"]
    assert said_by_workers(lines) == ["worker0: hello you"]


# Workers with an environment of their own start really, unlike all others of these tests.
OWN = {"env_vars": {"STARTS": "really"}}


@pytest.mark.parametrize(("number", "environment"), [(signal.SIGKILL, OWN), (signal.SIGINT, {})])
def test_nothing_is_left_when_the_driver_is_killed(
    number: int, environment: dict[str, Any], cluster: Any, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            f"""
            import os, sys, threading
            import farcall, ray

            def wait():
                threading.Event().wait()

            def is_warm():
                return "zygote" in sys.modules

            if {environment}:
                ray.init({cluster.address!r}, runtime_env={environment})
            with farcall.ray.start(1, resources={SMALL}, address={cluster.address!r}) as group:
                print(group[0].call(os.getpid), group[0].call(is_warm), flush=True)
                group[0].call(wait)
            """
        ),
        encoding="utf-8",
    )
    driver = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with driver:
        try:
            assert driver.stdout is not None
            process, is_warm = driver.stdout.readline().split()
            assert not (environment and is_warm == "True")
            death = os.pidfd_open(int(process))
            driver.send_signal(number)
            assert select.select([death], [], [], PATIENCE)[0]
            os.close(death)
        finally:
            driver.kill()


def test_the_first_program_on_the_page_prints_the_lines_of_the_page(
    cluster: Any, tmp_path: Path
) -> None:
    program = PROGRAMS["program"]
    done = run(tmp_path, program, RAY_ADDRESS=cluster.address)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^\s*print\(.*\)  # (.*)$", program, flags=re.MULTILINE)
    assert done.stdout.splitlines() == said


def test_a_script_that_knows_its_rank_runs_unchanged(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAMS["train.py"], encoding="utf-8")
    begin = f"import os, ray\nos.chdir({str(tmp_path)!r})\nray.init({cluster.address!r})\n"
    lines = run_until_shown(tmp_path, f"{begin}{PROGRAMS['run']}\ninput()\n", 4)
    assert said_by_workers(lines) == [
        "worker0: [tensor([2., 2.]), tensor([3., 3.])]",
        "worker0: done",
        "worker1: done",
        "worker2: done",
    ]


def test_a_script_that_fails_ends_all_and_says_how(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        dedent(
            """
            import os, signal, sys, threading
            places = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
            if places == ["1", "0", "1"]:
                os.kill(os.getpid(), int(sys.argv[1]))
            threading.Event().wait()
            """
        ),
        encoding="utf-8",
    )
    with pytest.raises(RuntimeError, match=r"'worker1' \(rank 1\) failed: killed by SIGTERM"):
        farcall.ray.run(
            str(script), str(int(signal.SIGTERM)), n=2, resources=SMALL, strategy="SPREAD"
        )
