"""`benchmarks/run.py`, run as `make bench` runs it, with as few blocks as there can be."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demos import SECONDS, assert_nothing_left, processes_of_session

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(RUN), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def endless() -> Iterator[subprocess.Popen[str]]:
    """A benchmark that would go on for a long time."""
    process = start("--blocks", "1000000", "--cases", "noop")
    yield process
    process.kill()
    process.communicate(timeout=SECONDS)


def peers_of(process: subprocess.Popen[str], implementation: str) -> list[int]:
    """Process ids by rank."""
    return sorted(
        pid
        for pid, command in processes_of_session(process.pid).items()
        if f"peer.py\0{implementation}\0" in command
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_stopped(pid: int, process: subprocess.Popen[str]) -> None:
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", process)


@linux_only
def test_benchmark_writes_its_numbers_and_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    process = start("--rounds", "1", "--blocks", "2", "--cases", "noop", "--json", str(path))
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    assert_nothing_left(process.pid)
    assert "| noop |" in stdout
    written = json.loads(path.read_text())
    assert written["training"] == {}
    for name in ("farcall", "torch"):
        assert len(written["seconds"][name]["noop"]) == 2 * 200
        assert min(written["seconds"][name]["noop"]) > 0


@linux_only
def test_interrupted_benchmark_leaves_no_process(endless: subprocess.Popen[str]) -> None:
    wait_until(lambda: len(peers_of(endless, "torch")) == 2, endless)
    os.kill(endless.pid, signal.SIGINT)
    endless.communicate(timeout=SECONDS)
    assert endless.returncode == 1
    assert_nothing_left(endless.pid)


@linux_only
def test_killed_benchmark_leaves_no_process_not_even_a_stopped_one(
    endless: subprocess.Popen[str],
) -> None:
    wait_until(lambda: len(peers_of(endless, "farcall")) == 2, endless)
    wait_until_stopped(peers_of(endless, "farcall")[1], endless)
    endless.kill()
    endless.wait(SECONDS)
    assert_nothing_left(endless.pid)


@linux_only
def test_peer_that_dies_is_named(endless: subprocess.Popen[str]) -> None:
    wait_until(lambda: len(peers_of(endless, "torch")) == 2, endless)
    dies = peers_of(endless, "torch")[1]
    wait_until_stopped(dies, endless)
    os.kill(dies, signal.SIGKILL)
    _, stderr = endless.communicate(timeout=SECONDS)
    assert endless.returncode == 1
    assert "Error: the torch peer in noop: ended before it answered" in stderr
    assert_nothing_left(endless.pid)


def test_overheads_are_compared_between_blocks_that_ran_next_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(RUN.parent)
    overheads = runpy.run_path(str(RUN))["overheads"]
    times = {
        "local": {"case": [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [3.0, 3.0]]},
        "farcall": {"case": [[2.0, 2.0], [5.0, 5.0], [2.0, 2.0], [4.0, 4.0]]},
        "torch": {"case": [[5.0, 5.0], [8.0, 8.0], [3.0, 3.0], [3.0, 3.0]]},
    }
    row = overheads(times, "case")  # shares: 1/4, 3/6, 1/2, and none, as torch added nothing
    assert (row["local_ms"], row["farcall_ms"], row["torch_ms"]) == (1500, 3000, 4000)
    assert row["farcall_overhead_per_torch_overhead"] == pytest.approx(1500 / 2500)
    assert row["of_blocks_percentile_25"] == pytest.approx(0.5)
    assert row["of_blocks_median"] == pytest.approx(0.5)
    assert row["of_blocks_percentile_75"] == math.inf
