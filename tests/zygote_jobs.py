"""The requests to a zygote (tests/zygote.py): programs, and their way over the connection."""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Python, the loader and torch's libraries read these before a program begins. A start that changes
# one is a real start, but for the two changes of `farcall launch --compat`.
READ_EARLY = tuple(
    b"PYTHON LD_ LC_ LANG MALLOC_ GOMP_ KMP_ MKL_ TORCH_ ATEN_ FARCALL_COMPAT".split()
)
READ_LATER = {b"PYTHONBREAKPOINT", b"PYTHONUNBUFFERED", b"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
_farcall = importlib.util.find_spec("farcall")
assert _farcall is not None
assert _farcall.origin is not None
BOOT = os.path.join(os.path.dirname(_farcall.origin), "compat", "boot")
WITHOUT_TORCH = "from multiprocessing.resource_tracker import"  # there sooner by a real start
MOST_DESCRIPTORS = 200  # of one message; Linux allows 253


class Program(NamedTuple):
    """A command line of Python, understood.

    Attributes:
        kind: "-c", "-m", or "" for a file.
        what: the code, the module, or the file.
        argv: what `sys.argv` is to be; a module puts its file in place of the first.
        is_unbuffered: whether `-u` was given.
        is_silent: whether `-W ignore` was given.
    """

    kind: str
    what: str
    argv: list[str]
    is_unbuffered: bool
    is_silent: bool


class Job(NamedTuple):
    """A request to a zygote; the descriptors come beside it.

    Attributes:
        program: what to run.
        command: the command line, as `ps` shows it.
        environment: all variables.
        targets: the numbers that the descriptors are to have.
        folder: the working directory.
        has_session: whether the process leads a session of its own.
        group: the process group to enter; -1 to stay, 0 for one of its own.
        ignored: the signals that are ignored.
        blocked: the signals that are blocked.
        first: a pickled function to be called first, or nothing.
    """

    program: Program
    command: list[bytes]
    environment: dict[bytes, bytes]
    targets: list[int]
    folder: str
    has_session: bool
    group: int
    ignored: list[int]
    blocked: list[int]
    first: bytes


class Preloads(NamedTuple):
    """A request to a zygote for another zygote, which has imported more; a socket comes beside it.

    Attributes:
        modules: what the other one imports.
    """

    modules: tuple[str, ...]


def program_of(command: Sequence[bytes]) -> Program | None:
    """Return what a command line of Python runs, or None if only a real start can tell."""
    words = [os.fsdecode(word) for word in command[1:]]
    is_unbuffered = is_silent = False
    while words:
        match words:
            case ["-B", *words] if sys.flags.dont_write_bytecode:  # as multiprocessing hands it on
                continue
            case ["-u", *words]:
                is_unbuffered = True
            case ["-W", "ignore", *words]:
                is_silent = True
            case ["-c", code, *_] if code.startswith(WITHOUT_TORCH):
                return None
            case ["-c" | "-m" as kind, what, *rest]:
                return Program(kind, what, [kind, *rest], is_unbuffered, is_silent)
            case [name, *_] if not name.startswith("-"):
                return Program("", name, words, is_unbuffered, is_silent)
            case _:
                return None
    return None


def is_compat(variables: Mapping[bytes, bytes]) -> bool:
    """Return whether farcall stands in for torch.distributed.rpc under these variables."""
    first, _, _ = variables.get(b"PYTHONPATH", b"").partition(os.fsencode(os.pathsep))
    return variables.get(b"FARCALL_COMPAT") == b"1" and first == os.fsencode(BOOT)


def before_compat(variables: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the variables without the changes that `farcall launch --compat` makes to them."""
    found = dict(variables)
    if is_compat(variables):
        del found[b"FARCALL_COMPAT"]
        _, _, rest = found.pop(b"PYTHONPATH").partition(os.fsencode(os.pathsep))
        if rest:
            found[b"PYTHONPATH"] = rest
    return found


def read_early(variables: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return those that Python, the loader or a library of torch reads before a program begins.

    Variables under which farcall stands in for torch's module have those of the zygote that can
    fork such programs: they are as if `farcall launch --compat` had changed nothing.
    """
    return {
        name: value
        for name, value in before_compat(variables).items()
        if name.startswith(READ_EARLY) and name not in READ_LATER
    }


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [struct.pack("!I", len(data))], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors, or nothing at the end of the connection."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, MOST_DESCRIPTORS + 3)
    if not head:
        return b"", []
    with connection.makefile("rb") as stream:
        return stream.read(struct.unpack("!I", head)[0]), descriptors
