"""Whole programs, run as users run them. Those of PyTorch's tutorials differ in the import only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 100


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(*command: str) -> subprocess.Popen[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "FARCALL_SECRET")
    }
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"the program hangs; it said: {process.communicate()}")
    return process.returncode, stdout, stderr


def run(program: str, *arguments: str) -> str:
    code, stdout, stderr = finished(start(str(PROGRAMS / program), *arguments))
    assert code == 0, stderr
    assert "Traceback" not in stderr
    return stdout


def test_parameter_server_with_a_global_object_and_a_lock() -> None:
    assert run("lock_server.py", free_port()) == "pushes 8\n"


def test_parameter_server_behind_a_reference() -> None:
    out = run("rref_server.py", free_port())
    assert out == "trainer2 trainer3 [25.0, 25.0, 25.0]\n"


def test_parameter_server_that_updates_in_batches() -> None:
    assert run("batch_server.py", free_port()) == "updates 5\n"


def test_agent_and_observers() -> None:
    assert run("observers.py", free_port()) == "{1: 15.0, 2: 15.0}\n"


def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, stdout, stderr = finished(start(*command, str(PROGRAMS / "torchrun_pair.py")))
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == [
        "worker0 greets worker1",
        "worker1 greets worker0",
    ]


def test_functions_of_main_reach_another_program_by_value(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    one = start(str(PROGRAMS / "one_of_two_mains.py"), url)
    other = start(str(PROGRAMS / "other_of_two_mains.py"), url)
    code, stdout, stderr = finished(one)
    assert code == 0, stderr
    assert stdout.split() == ["42", "8", "5"]
    code, _, stderr = finished(other)
    assert code == 0, stderr


def test_programs_without_shutdown_end(tmp_path: Path) -> None:
    """Whether they come to their end, raise or exit; also while a function still runs."""
    expected = {"ends": 0, "raises": 1, "exits": 5}
    running = {
        how: start(str(PROGRAMS / "no_shutdown.py"), f"file://{tmp_path}/{how}", how)
        for how in expected
    }
    for how, process in running.items():
        code, stdout, stderr = finished(process)
        assert (code, stdout) == (expected[how], "the end\n"), stderr
        assert ("a mistake of the user" in stderr) == (how == "raises")
