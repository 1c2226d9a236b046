"""The far end of a worker that is started by ssh: runs a command, and ends it with the connection.

    python -m farcall.processes.remote

It reads from stdin, which others can't see as they can a command line: a line of JSON, a `Task`,
and then numbers of signals, one a line, for the worker. When stdin ends, so does the worker.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from farcall.processes.dying import Guardian, signal_group, start, wait_for_group
from farcall.processes.exits import exit_status
from farcall.threads import FarcallThread


class Task(NamedTuple):
    """A command to run, and its variables beside those that are there."""

    command: Sequence[str]
    variables: Mapping[str, str]


def ssh_command(host: str, program: Sequence[str], python_path: str | None) -> list[str]:
    """Return the command that runs a Python program on a host, in the folder of this process."""
    path = f"PYTHONPATH={shlex.quote(python_path)} " if python_path else ""
    folder = shlex.quote(os.getcwd())
    python = shlex.join([sys.executable, *program])
    return ["ssh", host, f"cd {folder} && {path}exec {python}"]


def main() -> int:
    """Run a task, and return its exit status."""
    task = Task(*json.loads(sys.stdin.readline()))
    guardian = Guardian()  # first: this process may be killed as soon as there is a worker
    worker = start(task.command, {**os.environ, **task.variables}, stdout=None, stderr=None)
    guardian.watch(worker.pid)
    FarcallThread(lambda: _obey(worker), "farcall signals").start()
    code = wait_for_group(worker)
    guardian.release(worker.pid)
    guardian.close()
    return exit_status(code)


def _obey(worker: subprocess.Popen[bytes]) -> None:
    for line in sys.stdin:
        signal_group(worker.pid, signal.Signals(int(line)))
    signal_group(worker.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
