"""Whole programs, run as users run them. Those of PyTorch's tutorials differ in the import only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import free_port
from patience import PATIENCE

PROGRAMS = Path(__file__).parent / "programs"
CLEARED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "FARCALL_SECRET", "FARCALL_LISTEN")

Process = subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program of the folder `programs`; ends it and its children with the test."""
    environment = {name: value for name, value in os.environ.items() if name not in CLEARED}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    running: list[Process] = []

    def begin(program: str, *arguments: str, under: tuple[str, ...] = ()) -> Process:
        command = [sys.executable, *under, str(PROGRAMS / program), *arguments]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=environment, process_group=0
            )
        )
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def finished(process: Process) -> tuple[int, str, str]:
    """Exit code, what it printed, and what it complained of."""
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return process.returncode, stdout, stderr


def said(process: Process) -> str:
    """Return the output of a program that ended well."""
    code, stdout, stderr = finished(process)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    return stdout


def test_parameter_server_with_a_global_object_and_a_lock(start: Start) -> None:
    assert said(start("lock_server.py", free_port())) == "pushes 8\n"


def test_parameter_server_behind_a_reference(start: Start) -> None:
    out = said(start("rref_server.py", free_port()))
    assert out == "trainer2 trainer3 [25.0, 25.0, 25.0]\n"


def test_parameter_server_that_updates_in_batches(start: Start) -> None:
    assert said(start("batch_server.py", free_port())) == "updates 5\n"


def test_agent_and_observers(start: Start) -> None:
    assert said(start("observers.py", free_port())) == "{1: 15.0, 2: 15.0}\n"


@pytest.mark.parametrize("leaves", ["of_an_optimizer", "that_are_sent"])
def test_leaves_that_threads_share_block_no_thread(start: Start, leaves: str) -> None:
    assert said(start("shared_leaves.py", leaves)) == "done\n"


def test_torchrun_starts_a_group(start: Start) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = said(start("torchrun_pair.py", under=torchrun)).splitlines()
    assert sorted(lines) == ["worker0 greets worker1", "worker1 greets worker0"]


def test_functions_of_main_reach_another_program_by_value(start: Start, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    one, other = start("one_of_two_mains.py", url), start("other_of_two_mains.py", url)
    assert said(one).split() == ["42", "8", "5"]
    assert said(other) == ""


def test_programs_without_shutdown_end(start: Start, tmp_path: Path) -> None:
    """End by coming to the end, by raising or by exit; also while a function still runs."""
    expected = {"ends": 0, "raises": 1, "exits": 5}
    running = {how: start("no_shutdown.py", f"file://{tmp_path}/{how}", how) for how in expected}
    for how, process in running.items():
        code, stdout, stderr = finished(process)
        assert (code, stdout) == (expected[how], "the end\n"), stderr
        assert ("a mistake of the user" in stderr) == (how == "raises")
