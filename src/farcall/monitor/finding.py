"""The workers of this user on this machine: processes that listen on a Unix socket of farcall's.

On Linux, where these have abstract names, within one network namespace. Elsewhere none is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENS = "00010000"  # the flag of a socket that does, as /proc/net/unix has it
_NAME = re.compile(r"@farcall-[0-9a-f]{32}")
STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device",
    "T": "is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "Z": "has ended, and its parent has not looked after it",
}


class FoundProcess(NamedTuple):
    """A process that listens.

    Attributes:
        urls: where, as workers write addresses. Only one of them is, if another user forges some.
    """

    pid: int
    urls: tuple[str, ...]


def workers_here() -> list[FoundProcess]:
    """Return the workers of this user on this machine. Thread-safe."""
    listening: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()[1:]:
            fields = line.split()
            # Each user of the machine may choose a name with a line break in it, which is a line
            # here and claims any socket. So those that connect check the user.
            if len(fields) == 8 and fields[3] == _LISTENS and _NAME.fullmatch(fields[7]):
                listening.setdefault(f"socket:[{fields[6]}]", []).append(f"unix:{fields[7]}")
    if not listening:
        return []
    found = []
    for pid in _processes():
        # A child that was forked has the descriptor, too: the worker is the oldest.
        for socket in _sockets(pid) & listening.keys():
            found.append(FoundProcess(pid, tuple(dict.fromkeys(listening.pop(socket)))))
    return found


def state_of(pid: int) -> str:
    """Return in words what the system says of a process, or "" if it is gone."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        letter = status.rpartition(")")[2].split()[0]
        return STATES.get(letter, f"is in state {letter}")
    return ""


def descriptors_of(pid: int) -> tuple[int, int]:
    """Return how many descriptors a process has, and how many it may have; 0: unknown."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/limits").read_text("ascii", "replace").splitlines():
            if line.startswith("Max open files"):
                return len(os.listdir(f"/proc/{pid}/fd")), int(line.split()[3])
    return 0, 0


def busy_threads(pid: int) -> list[int]:
    """Return the threads of a process that are on a processor, or want to be."""
    busy = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, IndexError):
                status = Path(f"/proc/{pid}/task/{thread}/stat").read_text("utf-8", "replace")
                if status.rpartition(")")[2].split()[0] == "R":
                    busy.append(int(thread))
    return busy


def _processes() -> Iterator[int]:
    """Yield those of this user, the oldest first."""
    me = os.geteuid()
    for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == me:
                yield int(name)


def _sockets(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(descriptor.path))
    return found
