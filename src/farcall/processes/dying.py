"""No process is left: children end with their parent, also if that is killed.

Three things work together, since none is enough by itself:

- Linux kills a child when its parent ends (PR_SET_PDEATHSIG): at once, but no grandchildren.
- Each child leads a process group, in which its own children are unless they leave it.
- A guardian, a process of its own, kills these groups when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

# Reads "+PID" and "-PID" and kills the rest at the end. It is given as text, since a process
# that imports nothing is there in 20 ms.
_GUARDIAN = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process, even if it is stopped, when its parent ends.

    To be called in a child soon after its start; elsewhere than on Linux it does nothing. Linux
    means the *thread* that started the child: it must live as long as the child should.

    Args:
        parent: process id of the parent, in case that has ended already: then this process ends.
    """
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = subprocess.PIPE,
    stderr: int | IO[Any] | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one and leads a session, so a process group, of its own.

    Ctrl-C in a terminal therefore does not reach it. Call it in a thread that lives as long as the
    process should: see `end_with_parent`.

    Raises:
        OSError: the command can't be started.
    """
    parent = os.getpid()
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        # It imports nothing and takes no lock, so other threads of this process don't matter.
        preexec_fn=lambda: end_with_parent(parent),  # noqa: PLW1509
    )


def signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if it is still there.

    Args:
        leader: process id of the one that leads the group. It must not have been waited for yet,
            or another process may have its number.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def wait_for_group(process: subprocess.Popen[bytes]) -> int:
    """Wait until a process that leads its group has ended, kill the rest of the group.

    Returns:
        The exit code; a negative one is a signal's number.
    """
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    signal_group(process.pid, signal.SIGKILL)
    return process.wait()


class Guardian:
    """Kills process groups when this process is gone, however it ended. Thread-safe."""

    def __init__(self) -> None:
        self._telling = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, leader: int) -> None:
        """Kill this process group when this process ends."""
        self._tell(f"+{leader}\n")

    def release(self, leader: int) -> None:
        """Leave this process group alone: it has ended, and others may get its number."""
        self._tell(f"-{leader}\n")

    def close(self) -> None:
        """Kill the groups that are still watched, and end the guardian."""
        assert self._process.stdin is not None
        with self._telling, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._telling, contextlib.suppress(BrokenPipeError):  # it was killed
            if not self._process.stdin.closed:
                os.write(self._process.stdin.fileno(), line.encode())
