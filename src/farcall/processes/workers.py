"""Worker processes of `farcall launch`, on this machine or at the other end of ssh."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from farcall.processes.dying import Guardian, signal_group, start, wait_for_group
from farcall.processes.output import Output
from farcall.processes.places import Meeting
from farcall.processes.remote import Task, ssh_command

_OF_SSH = 128  # exit codes above it are signals, as shells have it
SSH_FAILED = 255
# Prefixes of variables that other hosts get of this environment, beside those for the worker.
_HANDED_ON = ("FARCALL_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_")


class Starter:
    """Starts processes that end with this one. To be used in one thread, which lives on.

    Args:
        output: shows what they print.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._guardian = Guardian()

    def start_worker(
        self, name: str, host: str | None, command: Sequence[str], variables: Mapping[str, str]
    ) -> WorkerProcess:
        """Start a worker.

        Args:
            name: its name in the output.
            host: where ssh goes; None for this machine.
            command: the program and its arguments.
            variables: of the environment, beside those of this process.

        Raises:
            OSError: it can't be started.
        """
        if host is None:
            process = start(command, {**os.environ, **variables})
        else:
            program = ["-m", "farcall.processes.remote"]
            process = _over_ssh(host, program)
            own = {n: v for n, v in os.environ.items() if n.startswith(_HANDED_ON)}
            _tell(process, json.dumps(Task(command, {**own, **variables})))
        self._guardian.watch(process.pid)
        self._output.follow_process(name, process)
        return WorkerProcess(process, self._guardian, host)

    def start_store(self, host: str | None, meeting: Meeting) -> tuple[WorkerProcess, int]:
        """Start the store at which workers meet.

        Args:
            host: where ssh goes; None for this machine.
            meeting: the address to listen on ("" for all) and the port (0 for any).

        Returns:
            Its process, and the port.

        Raises:
            OSError: it can't be hosted there; the reason is on stderr.
        """
        program = ["-m", "farcall.processes.store", meeting.host, str(meeting.port)]
        if host is None:
            command = [sys.executable, *program]
            process = start(command, os.environ, stdin=subprocess.PIPE, stderr=None)
        else:
            process = _over_ssh(host, program, stderr=None)
        self._guardian.watch(process.pid)
        store = WorkerProcess(process, self._guardian, host)
        assert process.stdout is not None
        with process.stdout:
            port = process.stdout.readline()
        if not port:
            store.wait()
            raise OSError(f"no store could be started on {host or 'this machine'}")
        return store, int(port)

    def close(self) -> None:
        """Kill the processes that are left."""
        self._guardian.close()


class WorkerProcess:
    """A process, or the ssh that has one at its other end. Thread-safe."""

    def __init__(
        self, process: subprocess.Popen[bytes], guardian: Guardian, host: str | None
    ) -> None:
        self._process = process
        self._guardian = guardian
        self._host = host
        self._ending = threading.Lock()
        self.pid = process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send the worker and its own children a signal, unless it has ended."""
        with self._ending:
            if self._process.returncode is not None:
                return
            if self._host is None or number is signal.SIGKILL:  # it ends with the connection
                signal_group(self.pid, number)
            else:
                _tell(self._process, str(int(number)))

    def wait(self) -> int:
        """Wait until it has ended, and nothing of it is left on this machine.

        Returns:
            The exit code; a negative one is a signal's number.
        """
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._ending:  # so that no signal goes to another process of this number
            code = wait_for_group(self._process)
        self._guardian.release(self.pid)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._host is not None and _OF_SSH < code < SSH_FAILED:
            return _OF_SSH - code
        return code


def _over_ssh(
    host: str, program: Sequence[str], stderr: int | None = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    command = ssh_command(host, program, os.environ.get("PYTHONPATH"))
    return start(command, os.environ, stdin=subprocess.PIPE, stderr=stderr)


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
