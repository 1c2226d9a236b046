"""`farcall demo parameter-server`, run as a user runs it: in processes of its own."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

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

skip_without("sklearn", "matplotlib")

pytestmark = pytest.mark.preloads(
    "sklearn.datasets",
    "sklearn.model_selection",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)

SUMMARY_LINE = re.compile(
    r"parameter-server (\w+) after ([\d.]+) epochs, [\d.]+ s: test accuracy ([\d.]+) %, "
    r"\d+ updates/s, \d+ images/s"
)
LOG_LINE = re.compile(r"epoch +[\d.]+  test accuracy +[\d.]+ %  +\d+ updates/s  +\d+ images/s")


class Trained(NamedTuple):
    """A run of the demo with its defaults; the mode is given."""

    mode: str
    result: subprocess.CompletedProcess[str]
    out: Path

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return summary


@pytest.fixture(scope="module", params=["async", "sync"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp(request.param)
    options = ("--mode", request.param, "--log-interval", "1", "--out", out)
    return Trained(request.param, run_farcall("demo", "parameter-server", *options), out)


def test_default_run_tells_over_95_percent_of_unseen_pictures_right(trained: Trained) -> None:
    assert trained.result.returncode == 0, trained.result.stderr
    first, *logged, last = trained.result.stdout.splitlines()
    assert first == "starting the workers"
    assert all(LOG_LINE.fullmatch(line) for line in logged), logged
    found = SUMMARY_LINE.fullmatch(last)
    assert found, last
    assert found.group(1, 2) == ("solved", "20.0")
    assert float(found[3]) > 95


def test_summary_holds_the_numbers_of_the_run(trained: Trained) -> None:
    summary = trained.summary
    assert (summary["outcome"], summary["solved"], summary["goal"]) == ("solved", True, 0.95)
    assert (summary["mode"], summary["trainers"], summary["seed"]) == (trained.mode, 3, 0)
    assert (summary["epochs"], summary["epochs_done"]) == (20, 20.0)
    assert summary["images"] == 20 * 1437
    batches = 20 * 15  # of each trainer: 479 pictures, 32 at once
    assert summary["updates"] == (batches if trained.mode == "sync" else 3 * batches)
    assert summary["accuracy"] > 0.95
    assert (summary["accuracy"] * 360) % 1 == pytest.approx(0, abs=1e-6)
    for unit in ("updates", "images"):
        assert summary[f"{unit}_per_second"] == pytest.approx(summary[unit] / summary["seconds"])


def test_summary_has_the_accuracy_over_time(trained: Trained) -> None:
    summary = trained.summary
    curve = summary["curve"]
    assert len(curve) >= 3
    for before, after in itertools.pairwise(curve):
        assert before["seconds"] < after["seconds"]
        assert before["updates"] <= after["updates"]
        assert before["images"] <= after["images"]
    assert curve[0]["accuracy"] < 0.5
    assert curve[-1] == {name: summary[name] for name in curve[-1]}


def test_accuracy_curve_is_a_readable_picture(trained: Trained) -> None:
    assert (trained.out / "accuracy.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = pytest.importorskip("matplotlib.image")
    height, width, channels = image.imread(trained.out / "accuracy.png").shape
    assert (height > 100, width > 100, channels) == (True, True, 4)


def test_run_that_misses_the_goal_says_so_and_exits_with_3(tmp_path: Path) -> None:
    options = ("--trainers", "1", "--epochs", "1", "--batch-size", "1000", "--out", tmp_path)
    result = run_farcall("demo", "parameter-server", *options)
    assert result.returncode == 3, result.stderr
    found = SUMMARY_LINE.fullmatch(result.stdout.splitlines()[-1])
    assert found
    assert found.group(1, 2) == ("unsolved", "1.0")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["solved"], summary["updates"], summary["images"]) == (False, 2, 1437)


# Far too many epochs, so that these runs end for the reason given.
ENDLESS = ("demo", "parameter-server", "--trainers", "2", "--epochs", "1000000")
ENDLESS += ("--log-interval", "1")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_ctrl_c_ends_all_processes_and_writes_the_results_so_far(tmp_path: Path, mode: str) -> None:
    process = start_demo(*ENDLESS, "--mode", mode, "--out", tmp_path)
    read_until(process, "epoch")
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stdout + stderr
    assert_nothing_left(process.pid)
    assert stdout.splitlines()[-1].startswith("parameter-server interrupted after")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["solved"]) == ("interrupted", False)
    assert len(summary["curve"]) >= 1
    assert (tmp_path / "accuracy.png").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_dead_worker_ends_the_demo_with_a_clear_error(tmp_path: Path) -> None:
    process = start_demo(*ENDLESS, "--mode", "sync", "--out", tmp_path)  # where others wait for it
    read_until(process, "epoch")
    os.kill(max(workers_of(process.pid)), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Error: rank" in stderr
    assert stdout.splitlines()[-1].startswith("parameter-server failed after")
    assert_nothing_left(process.pid)


CHAOS = ("demo", "parameter-server", "--chaos", "--trainers", "2", "--log-interval", "1")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_accuracy_is_reached_although_trainers_and_the_server_are_killed(tmp_path: Path) -> None:
    process = start_demo(*CHAOS, "--every", "1.5", "--deaths", "2", "--out", tmp_path)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert "was never looked at" not in stderr
    lines = stdout.splitlines()
    killed = [line for line in lines if re.fullmatch(r"trainer[12] was killed", line)]
    back = [line for line in lines if re.fullmatch(r"trainer[12] is back", line)]
    assert 2 <= len(back) <= len(killed)
    assert lines.count("server was killed") == lines.count("server is back") == 1
    assert any(line.startswith("the last snapshot has a test accuracy of ") for line in lines)
    assert lines[-1].startswith("parameter-server solved after ")
    assert lines[-1].endswith(f", 1 x server killed, {len(killed)} x trainer killed")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["deaths"] == {"server": 1, "trainer": len(killed)}
    assert summary["curve"][0]["accuracy"] < 0.5
    assert summary["accuracy"] > 0.95
    assert_nothing_left(process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_ends_a_chaotic_run_and_all_its_processes(tmp_path: Path) -> None:
    process = start_demo(*CHAOS, "--deaths", "1000000", "--out", tmp_path)
    read_until(process, "epoch")
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stdout + stderr
    assert_nothing_left(process.pid)


def test_chaos_that_comes_too_late_leaves_the_run_unsolved(tmp_path: Path) -> None:
    options = ("--epochs", "2", "--batch-size", "1000", "--every", "3600", "--out", tmp_path)
    result = run_farcall(*CHAOS, *options)
    assert result.returncode == 3, result.stderr
    assert "parameter-server unsolved after" in result.stdout


def test_chaos_is_refused_in_mode_sync_and_its_options_elsewhere() -> None:
    assert "'--chaos': it is for mode async" in refused(*CHAOS, "--mode", "sync")
    for option in ("--every", "--deaths"):
        assert f"'{option}': it is for --chaos" in refused("demo", "parameter-server", option, "2")


def test_help_says_what_chaos_means() -> None:
    said = " ".join(run_farcall("demo", "parameter-server", "--help").stdout.split())
    assert "With --chaos, a trainer is killed (SIGKILL) every few seconds" in said
    for option in ("--chaos", "--every", "--deaths"):
        assert option in said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--every", "0"),
        ("--deaths", "0"),
        ("--mode", "hogwild"),
        ("--trainers", "0"),
        ("--trainers", "65"),
        ("--epochs", "0"),
        ("--batch-size", "0"),
        ("--learning-rate", "0"),
        ("--learning-rate", "nan"),
        ("--seed", "-1"),
        ("--log-interval", "0"),
        ("--out", "/dev/null/folder"),
    ],
)
def test_bad_option_is_named_and_nothing_starts(option: str, value: str) -> None:
    assert option in refused("demo", "parameter-server", option, value)


def test_hogwild_is_refused_where_it_would_mean_nothing() -> None:
    result = run_farcall("demo", "parameter-server", "--mode", "sync", "--hogwild")
    assert result.returncode == 2
    assert "'--hogwild': it is for mode async" in result.stderr


def test_missing_package_is_named_with_the_way_to_install_it(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['sklearn'] = None; from farcall.cli import main; "
    demo = ["demo", "parameter-server", "--out", str(tmp_path)]
    command = [sys.executable, "-c", f"{hide}sys.argv[1:] = {demo!r}; sys.exit(main())"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 1
    assert 'pip install "farcall[demos]"' in result.stderr
    assert "sklearn" in result.stderr
    assert "Traceback" not in result.stderr


def test_list_of_demos_has_it() -> None:
    assert "parameter-server" in run_farcall("demo").stdout
