"""Groups of `farcall.ray.start`, begun and ended: refused, killed, without room, as scripts."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from patience import PATIENCE
from ray_nodes import two_nodes

import farcall
from farcall import errors, rpc

ray = pytest.importorskip("ray")
SMALL = {"CPU": 0.1}


class Unloadable(str):
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return int, ("no number",)


def my_name() -> str:
    return rpc.get_worker_info().name


def node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def is_warm() -> bool:
    return "zygote" in sys.modules


def say(text: str) -> None:
    print(text)
    print("on stderr", file=sys.stderr)


def end(code: int) -> None:
    os._exit(code)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def start_there() -> tuple[str, bool]:
    with farcall.ray.start(1, resources=SMALL) as group:
        return group[0].call(my_name), group[0].call(is_warm)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        ray.init(made.address, log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()


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
    # The task and the group's worker start really, which other workers of these tests do not.
    own = {"env_vars": {"ANY": "thing"}}
    task = ray.remote(num_cpus=0, runtime_env=own)(start_there)
    assert ray.get(task.remote()) == ("worker0", False)


def run(folder: Path, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(dedent(program), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **variables},
    )


def said_by_workers(lines: list[str]) -> list[str]:
    """Return the lines of workers, with their names, but not Ray's own before them."""
    plain = (re.sub(r"\x1b\[\d+m", "", line).strip() for line in lines)
    return sorted(re.sub(r"^\((\w+) pid=[^)]*\) ", r"\1: ", one) for one in plain if "pid=" in one)


def run_until_shown(folder: Path, program: str, count: int, **variables: str) -> list[str]:
    """Run a script, end its `input()` when it has shown so many lines of workers; return all."""
    script = folder / "script.py"
    script.write_text(dedent(program), encoding="utf-8")
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_DEDUP_LOGS": "0", **variables},
    )
    with driver:
        assert driver.stdout is not None
        lines: list[str] = []
        while len(said_by_workers(lines)) < count:
            lines.append(driver.stdout.readline())
            assert lines[-1], lines
        assert driver.stdin is not None
        driver.stdin.write("\n")
        driver.stdin.close()
        lines += driver.stdout  # `communicate` would leave out lines that were read ahead
        assert driver.wait(PATIENCE) == 0
        return lines


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_driver_is_killed(
    number: int, cluster: Any, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            f"""
            import os
            import threading
            import farcall

            def wait():
                threading.Event().wait()

            with farcall.ray.start(1, resources={SMALL}, address={cluster.address!r}) as group:
                print(group[0].call(os.getpid), flush=True)
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
            death = os.pidfd_open(int(driver.stdout.readline()))
            driver.send_signal(number)
            assert select.select([death], [], [], PATIENCE)[0]
            os.close(death)
        finally:
            driver.kill()


DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = {
    name: program
    for page in ("ray.md", "launch.md")
    for name, program in re.findall(
        r"<!-- ([\w. ]+) -->\n\n```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL
    )
}


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
