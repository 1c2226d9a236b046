"""Demos as tests run them: as a user does, in processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from patience import PATIENCE

from farcall.cli.commands import cli

COMMAND = (sys.executable, "-c", "import sys; from farcall.cli import main; sys.exit(main())")


def run_farcall(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def start_session(*command: str) -> subprocess.Popen[str]:
    """Starts a command in a session of its own, that Ctrl-C can end."""
    # Tests may run where it is ignored, as a shell has it for commands in the background.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as a shell makes one
        )
    finally:
        signal.signal(signal.SIGINT, handler)


def start_demo(*arguments: str | Path) -> subprocess.Popen[str]:
    """Starts `farcall` with the arguments, in a session of its own."""
    return start_session(*COMMAND, *map(str, arguments))


def refused(*arguments: str | Path) -> str:
    """Return the command's line of refusal of the arguments. Nothing starts then."""
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert "starting" not in result.output
    return " ".join(result.output.split())


def read_until(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    assert process.stderr is not None
    pytest.fail(f"the demo ended before it printed {start!r}: {process.stderr.read()}")


def processes_of_session(session: int) -> dict[int, str]:
    """Return the command lines of the session's living processes, by process id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            command = (stat.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state not in "ZX":
            found[int(stat.parent.name)] = command
    return found


def workers_of(session: int) -> list[int]:
    """Return the process ids of the session's living workers."""
    return [
        pid
        for pid, command in processes_of_session(session).items()
        if "multiprocessing.spawn" in command
    ]


def assert_nothing_left(session: int) -> None:
    for pid, command in processes_of_session(session).items():
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([ended], [], [], PATIENCE)[0], f"still running: {pid} {command}"
        finally:
            os.close(ended)
    # One that has ended is there until its parent has heard of it.
    deadline = time.monotonic() + PATIENCE
    while left := processes_of_session(session):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
