"""The processes of a demo that are started again when they were killed."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from farcall.demos.elastic_processes import ElasticProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a fork server")


def say_who_it_is(fifo: str, name: str) -> None:
    """Writes the process id, and lives as long as the test."""
    with open(fifo, "w", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {name}\n")
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def end_with_3(name: str) -> None:
    sys.exit(3)


def test_process_that_is_killed_is_started_again_and_none_is_left(tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    failures: list[str] = []
    run = functools.partial(say_who_it_is, fifo)
    with ElasticProcesses(run, ["w1"], [__name__], failures.append):
        first = read_line(fifo)
        os.kill(int(first[0]), signal.SIGKILL)
        second = read_line(fifo)
    assert first[1] == second[1] == "w1"
    assert first[0] != second[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(second[0]), 0)
    assert not failures


def read_line(fifo: str) -> list[str]:
    """Return the words of the next line. A writer that dies while it is open leaves an end."""
    words: list[str] = []
    while not words:
        with open(fifo, encoding="utf-8") as file:
            words = file.readline().split()
    return words


def test_process_that_fails_is_told_of_and_not_started_again() -> None:
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ElasticProcesses(end_with_3, ["w1"], [__name__], failures.put):
        assert failures.get(timeout=PATIENCE) == "w1 ended with exit code 3"
    assert failures.empty()


SWALLOWED = """
import itertools, os, signal
from farcall.demos.elastic import ElasticRun, Unrest

class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        while not run.interrupted:
            pass

def train(chaos):
    yield 1
    Swallows()
    yield from itertools.count(2)

class Display:
    def show(self, progress): pass
    def show_started(self, started, workers): pass

if __name__ == "__main__":
    run = ElasticRun(Display(), Unrest(every=3600, deaths=1, seed=0, work=1))
    run.launch(train, "main", {"w1": "worker"}, lambda death: [], lambda progress: 0, [])
    print(run.outcome("finished"), run.history)
"""


def test_ctrl_c_that_a_destructor_has_swallowed_ends_an_elastic_run(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SWALLOWED)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout == "interrupted [1]\n", done.stderr
