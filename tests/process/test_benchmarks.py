"""`benchmarks/run.py`, run as `make bench` runs it, with as few blocks as there can be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demos import SECONDS, assert_nothing_left, processes_of_session

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"
TINY = ("--rounds", "1", "--blocks", "2", "--cases")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


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
    """A benchmark that would go on for a long time, when its processes have started."""
    process = start("--blocks", "1000000", "--cases", "noop")
    try:
        deadline = time.monotonic() + SECONDS
        while len(peers_of(process)) < 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def peers_of(process: subprocess.Popen[str]) -> dict[int, str]:
    return {
        pid: command
        for pid, command in processes_of_session(process.pid).items()
        if "peer.py" in command
    }


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_benchmark_writes_its_numbers_and_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    process = start(*TINY, "noop,rnn_tiny", "--json", str(path))
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    assert_nothing_left(process.pid)
    assert "| noop |" in stdout
    assert "| rnn_tiny |" in stdout
    written = json.loads(path.read_text())
    seconds = written["seconds"]
    for name in ("farcall", "torch"):
        assert len(seconds[name]["noop"]) == 2 * 200
    for name in ("farcall", "torch", "local"):
        assert len(seconds[name]["rnn_tiny"]) == 2 * 40
        assert min(seconds[name]["rnn_tiny"]) > 0
    row = written["training"]["rnn_tiny"]
    assert row["of_blocks_percentile_25"] <= row["of_blocks_percentile_75"]
    assert row["farcall_overhead_ms"] == pytest.approx(row["farcall_ms"] - row["local_ms"])


def test_interrupted_benchmark_leaves_no_process(endless: subprocess.Popen[str]) -> None:
    os.kill(endless.pid, signal.SIGINT)
    endless.communicate(timeout=SECONDS)
    assert endless.returncode == 1
    assert_nothing_left(endless.pid)


def test_killed_benchmark_leaves_no_process_not_even_a_stopped_one(
    endless: subprocess.Popen[str],
) -> None:
    while all(state_of(pid) != "T" for pid in peers_of(endless)):
        time.sleep(0.01)
    endless.kill()
    assert_nothing_left(endless.pid)


@pytest.mark.parametrize("implementation", ["farcall", "torch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_peer_that_dies_is_named(
    endless: subprocess.Popen[str], implementation: str, rank: int
) -> None:
    pids = [pid for pid, command in peers_of(endless).items() if f"\0{implementation}\0" in command]
    os.kill(sorted(pids)[rank], signal.SIGKILL)
    _, stderr = endless.communicate(timeout=SECONDS)
    assert endless.returncode == 1
    assert f"Error: the {implementation} peer in noop: " in stderr
    assert "Traceback" not in stderr or rank == 1
    assert_nothing_left(endless.pid)
