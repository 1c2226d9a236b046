"""`benchmarks/run.py`, run as `make bench` runs it, with as few blocks as there can be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray_workers
from demos import assert_nothing_left, processes_of_session, start_session
from patience import PATIENCE
from warm_starts import HAS_ZYGOTES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = BENCHMARKS / "run.py"
# A burst of a case has a few calls only: whatever their number is, the burst is the same. Of the
# largest tensors one stays larger than what a worker accepts at once (`max_in_flight_bytes`); the
# others are still larger than any size from which farcall treats memory in another way.
PEER = f"""
import functools, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import cases, digits, peer, plans
cases.CALLS_IN_FLIGHT, cases.CALLS_OF_A_THREAD, cases.CALLS_OF_THE_RING = 50, 5, 5
cases.REFERENCES, cases.QUIET_SECONDS, cases.IDLE_SECONDS = 50, 0.1, 0.1
for name, case in cases.CALLS.items():
    if "_128mb" in name and name != "push_128mb":
        cases.CALLS[name] = functools.partial(case, floats=9 << 20)
cases.RING, plans.WORLDS["ring"] = 3, plans.World(3)
cases.STARTS = dict.fromkeys(cases.STARTS, 2)
digits.BATCHES = 2
# Else both workers of another checkout import it, at their first step.
import torch._dynamo
if sys.argv[1] == "ray":
    import ray._private.parameter as of_ray
    # No process that adds nodes to clusters which want more; warm starts of workers.
    changes = {{"no_monitor": True, "setup_worker_path": {ray_workers.__file__!r}}}
    of_ray.RayParams = functools.partial(of_ray.RayParams, **changes)
peer.main()
"""
# Cases share the processes of worlds that differ in their threads alone. These are counted below.
TINY = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import plans, run, turns
# In the folder of the files that the run writes.
turns.PEER = turns.Path(sys.argv[sys.argv.index("--out") + 1], "tiny_peer.py")
turns.PEER.write_text({PEER!r})
plans.WORLDS["ring"] = plans.World(3)
worlds = {{}}
for name, case in plans.CASES.items():
    world = worlds.setdefault(plans.WORLDS[case.world]._replace(threads=1), case.world)
    # A second step of training depends on the parameters learnt in the first.
    warm_up = 0 if case.agreement is None else 1
    plan = plans.Plan(1, 0, blocks=1, warm_up=warm_up)
    plans.CASES[name] = case._replace(plan=plan, world=world)
# The pictures of two cases differ in their units at most, and to draw all takes seconds.
draw_times = run.draw_times
run.draw_times = lambda times: draw_times(
    {{case: times[case] for case in {{plans.CASES[case].unit: case for case in times}}.values()}}
)
"""
RUN_TINY = f"{TINY}\nrun.main()"
RUN_DIFFERENT = f"{TINY}\nimport turns\nturns.disagreement = lambda *_: '1 against 2'\nrun.main()"
THREADS = f"""
import os, sys, traceback
sys.path.insert(0, {str(BENCHMARKS)!r})
import peer, plans, torch, workers
workers.end_with_parent()
implementation, store, world = sys.argv[1:]
world = plans.WORLDS[world]
print(torch.get_num_threads())
peer.set_threads(world)
try:
    with peer.joined(implementation, store, world) as rpc:
        for rank in range(world.size):
            # torch takes `torch.get_num_threads` itself for one of its operators.
            count = "__import__('torch').get_num_threads()"
            print(rpc.rpc_sync(f"{{world.name}}{{rank}}", eval, args=(count,)), flush=True)
except BaseException:
    traceback.print_exc()
    os._exit(1)  # an orderly end would wait for the other ranks
"""
TINY_SECONDS = 900
PNG = b"\x89PNG"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    from charts import TITLES
    from keep import HISTORY, keep
    from kept import kept_runs
    from plans import CASES, DEFAULT, TRAINING, WORLDS, groups
    from steps import Agreement, disagreement
    from table import Quartiles, Times, markdown, result_of
    from turns import Blocks, disagreements_in

# Not "rnn_real", which is "rnn_tiny" with larger numbers, and of the rows with torch's default
# threads only one: they differ in their worlds alone, whose threads are counted below.
SHORT = tuple(
    case
    for case in CASES
    if case != "rnn_real"
    and (not CASES[case].world.endswith(DEFAULT) or case == f"embedding{DEFAULT}")
)

pytestmark = pytest.mark.preloads(
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "torch.distributed.nn",
    "torch.distributed.optim",
    "gymnasium",
)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def start(*arguments: str, program: tuple[str, ...] = (str(RUN),)) -> subprocess.Popen[str]:
    return start_session(sys.executable, *program, *arguments)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a benchmark that would go on for a long time."""
    process = start("--blocks", "1000000", "--cases", "noop", "--out", str(tmp_path))
    yield process
    process.kill()
    process.communicate(timeout=PATIENCE)


def peers_of(process: subprocess.Popen[str], implementation: str) -> list[int]:
    """Process ids by rank."""
    return sorted(
        pid
        for pid, command in processes_of_session(process.pid).items()
        if f"peer.py\0{implementation}\0" in command
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_stopped(pid: int, process: subprocess.Popen[str]) -> None:
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", process)


def run_tiny(out: Path, *arguments: str) -> dict[str, Any]:
    """Measures everything once only, and returns its report."""
    process = start("--rounds", "1", "--out", str(out), *arguments, program=("-c", RUN_TINY))
    stdout, stderr = process.communicate(timeout=TINY_SECONDS)
    assert process.returncode == 0, stderr
    assert_nothing_left(process.pid)
    assert (out / "table.md").read_text("utf-8") == stdout
    for picture in ("ratios.png", "times.png"):
        assert (out / picture).read_bytes().startswith(PNG)
    written: dict[str, Any] = json.loads((out / "bench.json").read_text("utf-8"))
    return written


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measure all short cases in one run: its start and its pictures take as long as a case."""
    return run_tiny(tmp_path_factory.mktemp("short"), "--cases", ",".join(SHORT))


@linux_only
@pytest.mark.timeout(TINY_SECONDS + 20)
def test_benchmark_is_incomplete_without_all_cases_and_leaves_no_process(
    short_run: dict[str, Any],
) -> None:
    assert list(short_run["results"]) == list(short_run["seconds"]) == list(SHORT)
    assert short_run["run"]["rounds"] == 1
    assert not short_run["run"]["complete"]


@linux_only
@pytest.mark.timeout(TINY_SECONDS + 20)
@pytest.mark.parametrize("case", SHORT)
def test_benchmark_writes_the_numbers_of_a_case(short_run: dict[str, Any], case: str) -> None:
    local = ["local"] if case.startswith("rnn_") else []
    assert list(short_run["seconds"][case]) == [*local, "farcall", "torch"]
    for name, blocks in short_run["seconds"][case].items():
        [[seconds]] = blocks
        assert seconds > 0
        unit = CASES[case].unit
        assert short_run["results"][case]["times"][name]["median"] == unit.of(seconds)
    assert list(short_run["results"][case]["ratios"]) == ["torch"]


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", *who, "-C", str(root), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_run_is_kept_if_it_is_of_this_commit_and_no_file_differs(tmp_path: Path) -> None:
    root, bench = tmp_path / "checkout", tmp_path / "bench.json"
    root.mkdir()
    git(root, "init", "--quiet")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "one")
    run = {
        "date": "2026-11-28T15:20Z",
        "commit": git(root, "rev-parse", "HEAD"),
        "clean": True,
        "machine": "2 cores",
        "rounds": 3,
        "complete": True,
    }
    measured = {"python": "3.12.3", "versions": {"torch": "2.13.0"}}
    bench.write_text(json.dumps({"run": run, "machine": measured, "results": {}}), "utf-8")
    stray = root / "stray"
    stray.touch()
    with pytest.raises(SystemExit, match="not kept, since files differ from the commit"):
        keep(bench, root)
    stray.unlink()
    path = keep(bench, root)
    assert path.parent == root / HISTORY
    assert [one.commit for one in kept_runs(root / HISTORY)] == [run["commit"]]
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "two")
    with pytest.raises(SystemExit, match=r"measured commit \w+, and HEAD is \w+: check that"):
        keep(bench, root)


def test_cases_of_the_readmes_chart_exist() -> None:
    assert set(TITLES) <= set(CASES)


def test_each_training_case_has_a_row_with_default_threads_beside_it() -> None:
    names = list(CASES)
    for case in TRAINING:
        beside = names[names.index(case) + 1]
        assert beside == f"{case}{DEFAULT}"
        assert CASES[beside]._replace(plan=CASES[case].plan, world=CASES[case].world) == CASES[case]
        one, default = (WORLDS[CASES[name].world] for name in (case, beside))
        assert one._replace(threads=None) == default


@linux_only
@pytest.mark.timeout(TINY_SECONDS + 20)
@pytest.mark.parametrize("implementation", ["farcall", "torch"])
@pytest.mark.parametrize("world", ["ddp", f"ddp{DEFAULT}"])
def test_workers_have_one_thread_or_as_many_as_torch_takes_by_default(
    tmp_path: Path, implementation: str, world: str
) -> None:
    arguments = (implementation, str(tmp_path / "store"), world)
    process = start(*arguments, program=("-W", "ignore", "-c", THREADS))
    stdout, stderr = process.communicate(timeout=TINY_SECONDS)
    assert process.returncode == 0, stderr
    assert_nothing_left(process.pid)
    default, *found = map(int, stdout.split())
    assert found == [default if world.endswith(DEFAULT) else 1] * 4


@linux_only
@pytest.mark.timeout(TINY_SECONDS + 20)
def test_benchmark_fails_but_shows_its_table_if_something_else_was_computed(tmp_path: Path) -> None:
    arguments = ("--rounds", "1", "--cases", "embedding", "--out", str(tmp_path))
    process = start(*arguments, program=("-c", RUN_DIFFERENT))
    stdout, stderr = process.communicate(timeout=TINY_SECONDS)
    assert process.returncode == 1
    assert "farcall computed something else than torch in embedding: 1 against 2" in stderr
    assert (tmp_path / "table.md").read_text("utf-8") == stdout


@pytest.mark.parametrize(
    ("agreement", "theirs", "says"),
    [
        (Agreement(0.1), [2.0, 4.0], None),
        (Agreement(0.1), [2.1, 3.9], None),
        (Agreement(0.1), [2.0, 5.0], "4.0 against 5.0 in step 2"),
        (Agreement(0.1), [float("nan"), 4.0], "2.0 against nan in step 1"),
        (Agreement(0.1), [2.0], "2 values against 1"),
        (Agreement(0.1, in_mean=True), [4.0, 2.0], None),
        (Agreement(0.1, in_mean=True), [4.0, 4.0], "3.0 against 4.0 in the mean of 2 steps"),
    ],
)
def test_differences_are_named(agreement: Agreement, theirs: list[float], says: str | None) -> None:
    assert disagreement(agreement, [2.0, 4.0], theirs) == says


@pytest.mark.parametrize("case", [name for base in TRAINING for name in (base, base + DEFAULT)])
def test_each_training_case_is_compared_with_torch_but_not_with_one_process(case: str) -> None:
    values = {"local": [9.0], "farcall": [1.0], "torch": [2.0]}
    [sentence] = disagreements_in(case, values)
    assert sentence.startswith(f"farcall computed something else than torch in {case}: 1.0 ")
    assert not list(disagreements_in(case, {**values, "torch": [1.0]}))


@linux_only
def test_benchmark_counts_rounds_and_blocks(tmp_path: Path) -> None:
    arguments = ("--rounds", "2", "--blocks", "3", "--cases", "noop", "--out", str(tmp_path))
    process = start(*arguments, "--implementations", "farcall")
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    seconds = json.loads((tmp_path / "bench.json").read_text("utf-8"))["seconds"]
    assert [len(block) for block in seconds["noop"]["farcall"]] == [200] * 6


@linux_only
def test_another_checkout_is_measured_beside_this_one(tmp_path: Path) -> None:
    other = tmp_path / "other"
    # Others may write compiled files there now, under names that go at once.
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(BENCHMARKS.parent / "src", other / "src", ignore=ignored)
    note = tmp_path / "note"
    with (other / "src" / "farcall" / "rpc.py").open("a") as source:
        source.write(f"\nopen({str(note)!r}, 'w').close()\n")
    arguments = ("--implementations", "farcall", "--against", str(other))
    written = run_tiny(tmp_path, *arguments, "--cases", "noop,embedding")
    for case in ("noop", "embedding"):
        assert list(written["seconds"][case]) == ["farcall", "before"]
        assert list(written["results"][case]["ratios"]) == ["before"]
    assert note.exists()


def test_a_checkout_that_is_not_built_is_refused(tmp_path: Path) -> None:
    process = start("--against", str(tmp_path), "--out", str(tmp_path))
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "run `make native` there" in " ".join(stderr.split())


@linux_only
@pytest.mark.timeout(TINY_SECONDS + 20)
@pytest.mark.parametrize("name", ["ray", "rpyc", "grpc"])
def test_other_library_runs_the_cases_that_it_can(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name, reason="make bench-all installs it")
    # Ray would start more workers ahead than the cases need.
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    monkeypatch.setenv("RAY_enable_worker_prestart", "0")
    cases = [case for case in CASES if name in CASES[case].implementations and case != "start_8"]
    arguments = ("--implementations", f"farcall,{name}", "--cases", ",".join(cases))
    with ExitStack() as stack:
        if name == "ray" and HAS_ZYGOTES:
            path_of_modules = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
            server = stack.enter_context(ray_workers.server(path_of_modules))
            monkeypatch.setenv(ray_workers.SERVER, server)
        written = run_tiny(tmp_path, *arguments)
    assert list(written["seconds"]) == cases
    for case in cases:
        assert list(written["seconds"][case]) == ["farcall", name]


def test_each_implementation_starts_first_in_as_many_rounds() -> None:
    [group] = groups(["noop", "echo_16mb"], ["farcall", "torch", "before"], None)
    rounds = [group.begun_by_another(turn).implementations for turn in range(6)]
    for case, names in group.implementations.items():
        assert rounds[0][case] == names
        firsts = [names_of_round[case][0] for names_of_round in rounds]
        assert sorted(firsts) == sorted(names * (6 // len(names)))
        assert all(sorted(names_of_round[case]) == sorted(names) for names_of_round in rounds)


@linux_only
def test_interrupted_benchmark_leaves_no_process(endless: subprocess.Popen[str]) -> None:
    wait_until(lambda: len(peers_of(endless, "torch")) == 2, endless)
    os.kill(endless.pid, signal.SIGINT)
    endless.communicate(timeout=PATIENCE)
    assert endless.returncode == 1
    assert_nothing_left(endless.pid)


@linux_only
def test_killed_benchmark_leaves_no_process_not_even_a_stopped_one(
    endless: subprocess.Popen[str],
) -> None:
    wait_until(lambda: len(peers_of(endless, "farcall")) == 2, endless)
    wait_until_stopped(peers_of(endless, "farcall")[1], endless)
    endless.kill()
    endless.wait(PATIENCE)
    assert_nothing_left(endless.pid)


@linux_only
def test_peer_that_dies_is_named(endless: subprocess.Popen[str]) -> None:
    wait_until(lambda: len(peers_of(endless, "torch")) == 2, endless)
    dies = peers_of(endless, "torch")[1]
    wait_until_stopped(dies, endless)
    os.kill(dies, signal.SIGKILL)
    _, stderr = endless.communicate(timeout=PATIENCE)
    assert endless.returncode == 1
    assert "Error: the torch peer in noop: ended before it answered" in stderr
    assert_nothing_left(endless.pid)


def test_times_are_compared_between_blocks_that_ran_next_to_each_other() -> None:
    ours = [[2.0, 2.0], [5.0, 5.0], [2.0, 2.0], [4.0, 4.0]]
    theirs = [[6.0, 6.0], [10.0, 10.0], [8.0, 8.0], [4.0, 4.0]]
    found = result_of("noop", {"farcall": ours, "torch": theirs})  # ratios: 3, 2, 4, 1
    assert found.times["farcall"] == Times(3e6, 5e6)
    assert found.times["torch"] == Times(7e6, 10e6)
    assert found.ratios == {"torch": Quartiles(2.0, 2.5, 4.0)}


def test_the_time_that_training_adds_to_one_process_is_compared() -> None:
    local = [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [3.0, 3.0]]
    ours = [[2.0, 2.0], [5.0, 5.0], [2.0, 2.0], [3.0, 3.0]]
    theirs = [[5.0, 5.0], [8.0, 8.0], [1.0, 1.0], [4.0, 4.0]]
    found = result_of("rnn_tiny", {"local": local, "farcall": ours, "torch": theirs})
    # Torch adds 4, 6, nothing and 1, farcall 1, 3, 1 and nothing; 100, 150, 100 and 0 percent.
    assert found.times["local"] == Times(1500, 3000)
    assert found.times["farcall"] == Times(2500, 5000, 1000, Quartiles(100, 100, 150))
    percent = Quartiles(pytest.approx(100 / 3), pytest.approx(500 / 3), 400)
    assert found.times["torch"] == Times(4500, 8000, 3000, percent)
    assert found.ratios == {"torch": Quartiles(2.0, 3.0, None)}
    assert found.step_ratios == {"torch": Quartiles(*map(pytest.approx, (4 / 3, 22 / 15, 2.5)))}


@pytest.mark.parametrize(
    ("case", "blocks", "says"),
    [
        ("noop", {"farcall": [[1.0]], "torch": [[20.0]]}, ("20 x", True)),
        ("noop", {"farcall": [[1.0]], "torch": [[19.9]]}, ("20 x", False)),
        ("noop", {"farcall": [[1.0]]}, (None, None)),
        ("echo_1mb", {"farcall": [[1.0]], "torch": [[20.0]]}, (None, None)),
        ("in_flight", {"farcall": [[1.0]], "torch": [[6.0]]}, ("6 x", True)),
        ("rnn_tiny", {"local": [[1.0]], "farcall": [[2.0]], "torch": [[5.0]]}, ("4 x", True)),
        ("rnn_tiny", {"local": [[1.0]], "farcall": [[2.0]], "torch": [[4.9]]}, ("4 x", False)),
        ("rnn_tiny", {"local": [[1.0]], "farcall": [[1.0]], "torch": [[5.0]]}, ("4 x", True)),
        ("rnn_real", {"local": [[1.0]], "farcall": [[1.125]]}, ("adds at most 15 %", True)),
        ("rnn_real", {"local": [[1.0]], "farcall": [[1.25]]}, ("adds at most 15 %", False)),
        (
            "rnn_tiny_default",
            {"local": [[1.0]], "farcall": [[2.0]], "torch": [[3.0]]},
            ("1.5 x per step", True),
        ),
        ("embedding_default", {"farcall": [[2.0]], "torch": [[2.9]]}, ("1.5 x per step", False)),
        ("embedding", {"farcall": [[2.0]], "torch": [[2.9]]}, (None, None)),
        ("rnn_real_default", {"farcall": [[2.0]], "torch": [[2.0]]}, ("1 x per step", True)),
        ("idle", {"farcall": [[0.001]]}, ("at most 1 % of a core", True)),
        ("idle", {"farcall": [[0.5]]}, ("at most 1 % of a core", False)),
    ],
)
def test_table_says_which_goals_are_reached(
    case: str, blocks: dict[str, Blocks], says: tuple[str | None, bool | None]
) -> None:
    found = result_of(case, blocks)
    assert (found.bar, found.is_met) == says


def test_table_has_a_column_for_each_implementation_and_dashes_where_it_has_no_times() -> None:
    rpyc = {"farcall": [[2e-6]], "torch": [[5e-6]], "rpyc": [[4e-6]]}
    results = {"noop": result_of("noop", rpyc), "ring": result_of("ring", {"farcall": [[123e-6]]})}
    assert markdown(results).splitlines() == [
        "| case | unit | farcall | torch | rpyc | torch / farcall | rpyc / farcall "
        "| to reach | met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| noop | us | 2.00 (2.00) | 5.00 (5.00) | 4.00 (4.00) | 2.50 (2.50 to 2.50) "
        "| 2.00 (2.00 to 2.00) | 20 x | no |",
        "| ring | us | 123 (123) | - | - | - | - | - | - |",
    ]


def test_table_has_the_ratio_of_whole_steps_beside_that_of_added_time() -> None:
    blocks = {"local": [[1e-3]], "farcall": [[2e-3]], "torch": [[4e-3]]}
    row = markdown({"rnn_tiny": result_of("rnn_tiny", blocks)}).splitlines()[-1]
    assert "| 3.00 (3.00 to 3.00), per step 2.00 (2.00 to 2.00) |" in row


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cases", "noop,nothing"), "'nothing' is none of noop,"),
        (("--implementations", "torch"), "'farcall' must be among them"),
        (("--implementations", "farcall,spark"), "'spark' is none of farcall, torch, ray"),
    ],
)
def test_wrong_option_is_named(arguments: tuple[str, ...], says: str) -> None:
    _, stderr = start(*arguments).communicate(timeout=PATIENCE)
    assert says in " ".join(stderr.replace("│", " ").split())
