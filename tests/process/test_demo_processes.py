"""The processes of a demo that are started again when they were killed."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import signal
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
