"""`farcall demo cartpole`, run as a user runs it: in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demos import (
    assert_nothing_left,
    read_until,
    refused,
    run_farcall,
    start_demo,
    workers_of,
)
from optional import skip_without
from patience import PATIENCE

skip_without("gymnasium", "matplotlib")

pytestmark = pytest.mark.preloads(
    "gymnasium", "matplotlib.figure", "matplotlib.backends.backend_agg"
)


def play_three_episodes(out: Path) -> subprocess.CompletedProcess[str]:
    episodes = ("--max-episodes", "3", "--log-interval", "1")
    return run_farcall("demo", "cartpole", "--observers", "2", *episodes, "--out", out)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cartpole")


@pytest.fixture(scope="module")
def played(out: Path) -> subprocess.CompletedProcess[str]:
    return play_three_episodes(out)


def test_unsolved_run_says_so_in_one_line_and_exits_with_3(
    played: subprocess.CompletedProcess[str],
) -> None:
    assert played.returncode == 3, played.stderr
    lines = played.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["episode", str(n)] for n in (1, 2, 3)]
    assert re.fullmatch(
        r"cartpole unsolved after 3 episodes, [\d.]+ s: running reward [\d.]+, "
        r"\d+ env steps/s, \d+ calls/s",
        lines[4],
    )
    assert len(lines) == 5


@pytest.mark.usefixtures("played")
def test_summary_holds_the_numbers_of_the_run(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    assert summary["solved"] is False
    assert summary["episodes"] == 3
    assert summary["observers"] == 2
    assert {"seed", "gamma", "running_reward", "seconds"} <= summary.keys()
    assert summary["env_steps"] >= 2 * sum(summary["rewards"])  # the reward is the lower one
    assert summary["calls"] == 2 * summary["env_steps"] + 2 * 3
    rate = summary["env_steps"] / summary["seconds"]
    assert summary["env_steps_per_second"] == pytest.approx(rate)
    assert summary["calls_per_second"] == pytest.approx(summary["calls"] / summary["seconds"])


@pytest.mark.usefixtures("played")
def test_reward_curve_is_a_readable_picture(out: Path) -> None:
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = pytest.importorskip("matplotlib.image")
    height, width, channels = image.imread(out / "reward.png").shape
    assert (height > 100, width > 100, channels) == (True, True, 4)


@pytest.mark.usefixtures("played")
def test_equal_seeds_give_equal_runs_however_the_observers_interleave(
    out: Path, tmp_path: Path
) -> None:
    again = play_three_episodes(tmp_path)
    assert again.returncode == 3, again.stderr
    first, second = (json.loads((path / "summary.json").read_text()) for path in (out, tmp_path))
    assert first["rewards"] == second["rewards"]
    assert first["env_steps"] == second["env_steps"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("moment", ["starting", "episode"])
def test_ctrl_c_ends_all_processes_and_writes_the_results_so_far(
    tmp_path: Path, moment: str
) -> None:
    process = start_demo("demo", "cartpole", "--log-interval", "1", "--out", tmp_path)
    read_until(process, moment)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stdout + stderr
    assert_nothing_left(process.pid)
    if moment == "episode":
        assert stdout.splitlines()[-1].startswith("cartpole interrupted after")
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert (summary["outcome"], summary["solved"]) == ("interrupted", False)
        assert summary["episodes"] >= 1
        assert (tmp_path / "reward.png").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_dead_worker_ends_the_demo_with_a_clear_error(tmp_path: Path) -> None:
    process = start_demo("demo", "cartpole", "--log-interval", "1", "--out", tmp_path)
    read_until(process, "episode")
    os.kill(max(workers_of(process.pid)), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Error: rank" in stderr
    assert stdout.splitlines()[-1].startswith("cartpole failed after")
    assert_nothing_left(process.pid)


# A random policy reaches 20 or so. Learning to 30 takes no luck, but some seconds.
ELASTIC = ("demo", "cartpole", "--elastic", "--log-interval", "1", "--goal", "30")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@on_linux
def test_elastic_run_learns_although_observers_are_killed(tmp_path: Path) -> None:
    options = ("--every", "3", "--deaths", "2", "--out", tmp_path)
    process = start_demo(*ELASTIC, *options)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    lines = stdout.splitlines()
    killed = [line for line in lines if re.fullmatch(r"observer[12] was killed", line)]
    back = [line for line in lines if re.fullmatch(r"observer[12] is back", line)]
    assert 2 <= len(back) <= len(killed)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert lines[-1].startswith("cartpole solved after")
    assert lines[-1].endswith(f", {len(killed)} x observer killed")
    assert (summary["solved"], summary["deaths"]) == (True, {"observer": len(killed)})
    assert summary["running_reward"] > 30
    assert_nothing_left(process.pid)


@on_linux
@pytest.mark.parametrize("moment", ["starting", "episode"])
def test_ctrl_c_ends_an_elastic_run_and_all_its_processes(tmp_path: Path, moment: str) -> None:
    process = start_demo(*ELASTIC, "--deaths", "1000000", "--out", tmp_path)
    read_until(process, moment)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stdout + stderr
    assert_nothing_left(process.pid)
    if moment == "episode":
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert (summary["outcome"], summary["solved"]) == ("interrupted", False)


@on_linux
def test_elastic_run_that_is_killed_itself_leaves_no_process(tmp_path: Path) -> None:
    process = start_demo(*ELASTIC, "--deaths", "1000000", "--out", tmp_path)
    read_until(process, "episode")
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert_nothing_left(process.pid)


@pytest.mark.parametrize("option", ["--every", "--deaths"])
def test_options_for_elastic_runs_are_refused_elsewhere(option: str) -> None:
    assert f"'{option}': it is for --elastic" in refused("demo", "cartpole", option, "2")


def test_help_says_what_elastic_means() -> None:
    said = " ".join(run_farcall("demo", "cartpole", "--help").stdout.split())
    assert "With --elastic, observers are killed (SIGKILL) while they play" in said
    for option in ("--elastic", "--every", "--deaths", "--goal"):
        assert option in said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--observers", "0"),
        ("--gamma", "1.5"),
        ("--gamma", "-0.1"),
        ("--log-interval", "0"),
        ("--max-episodes", "0"),
        ("--goal", "500"),
        ("--every", "0"),
        ("--deaths", "0"),
        ("--seed", "-1"),
        ("--out", "/dev/null/folder"),
    ],
)
def test_bad_option_is_named_and_nothing_starts(option: str, value: str) -> None:
    assert option in refused("demo", "cartpole", option, value)


def test_missing_package_is_named_with_the_way_to_install_it(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['gymnasium'] = None; from farcall.cli import main; "
    run = f"sys.argv[1:] = ['demo', 'cartpole', '--out', {str(tmp_path)!r}]; sys.exit(main())"
    command = [sys.executable, "-c", hide + run]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 1
    assert 'pip install "farcall[demos]"' in result.stderr
    assert "gymnasium" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_and_the_list_of_demos_need_no_demo() -> None:
    assert re.match(r"farcall, version \d", run_farcall("--version").stdout)
    assert "cartpole" in run_farcall("demo").stdout
    assert "demo" in run_farcall("--help").stdout
