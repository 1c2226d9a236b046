"""Has `subprocess` and `multiprocessing` start Python warm: see `zygote`."""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
from patience import PATIENCE
from zygote_jobs import MOST_DESCRIPTORS, Job, Preloads, program_of, read_early, receive, send

PADDING = "x" * (1 << 16)  # room in which a process keeps its command line and environment
# A zygote has no variables of the test that starts it first: an import of torch would make a folder
# in that test's TMPDIR, and a test may look for processes by a variable of its own.
_BEFORE_TESTS = {
    name: value
    for name, value in os.environb.items()
    if name != b"OMP_NUM_THREADS"  # OpenMP's threads would be lost in forks
}
# A zygote forks, and must have one thread only.
OF_ZYGOTES = {b"OPENBLAS_NUM_THREADS": b"1", b"PADDING": PADDING.encode()}
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # <sys/prctl.h>

_real_start: Callable[..., int] = _posixsubprocess.fork_exec
HAS_ZYGOTES = sys.platform == "linux" and not os.environ.get("TESTS_COLD")
_MAIN = """
import sys
sys.path[0] = sys.argv[2]
import zygote
del sys.path[0]
zygote.serve(int(sys.argv[1]))()
"""


class Zygote:
    """The zygote of this process: forks processes that become children of this one. Thread-safe.

    Args:
        connection: to the zygote.
        early: the variables in its environment that an import or a library may have read.
        process: the zygote, if it is a child that this process has to wait for.
    """

    of_this_process: ClassVar[Zygote | None] = None  # that of a program which is a fork of one

    def __init__(
        self,
        connection: socket.socket,
        early: Mapping[bytes, bytes],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._connection = connection
        self.early = early
        self._process = process
        self._owner = (os.getpid(), os.getsid(0), os.getpgrp())
        self._asking = threading.Lock()
        self.has_failed = False
        connection.settimeout(PATIENCE)

    @classmethod
    def started(cls, variables: Mapping[bytes, bytes]) -> Zygote:
        """Start one for a process that has none, with these variables of the environment."""
        ours, theirs = socket.socketpair()
        early = read_early(variables)
        others = {n: v for n, v in _BEFORE_TESTS.items() if n not in read_early(_BEFORE_TESTS)}
        with theirs:
            more = [str(theirs.fileno()), str(Path(__file__).parent), PADDING]
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, *more],
                pass_fds=[theirs.fileno()],
                env={**others, **early, **OF_ZYGOTES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        return cls(ours, early, process)

    def having(self, modules: tuple[str, ...]) -> Zygote:
        """Return a fork of it that has imported these modules, too; it ends with this one."""
        ours, theirs = socket.socketpair()
        with theirs, self._asking:
            send(self._connection, pickle.dumps(Preloads(modules)), [theirs.fileno()])
        return Zygote(ours, self.early)

    def close(self) -> None:
        """End it; the processes that it has forked live on."""
        self._connection.close()
        if self._process is not None:
            self._process.kill()  # a fork of this process may have the connection open
            self._process.wait()

    def job_of(
        self, given: Sequence[Any], variables: dict[bytes, bytes]
    ) -> tuple[Job, list[int]] | None:
        """Return what to ask for in place of a start, with descriptors; None for a real start.

        Args:
            given: the arguments of `_posixsubprocess.fork_exec`, for this Python.
            variables: the environment among them.
        """
        command, _, close_fds, kept, folder = given[:5]
        pipes, wakes = (given[6], given[9], given[11]), given[13]
        has_session, group, *of_others, first = given[15:22]
        command = [os.fsencode(word) for word in command]
        program = program_of(command)
        folder = os.fsdecode(folder) if folder is not None else os.getcwd()
        if (
            self._owner != (os.getpid(), os.getsid(0), os.getpgrp())
            or not close_fds
            or program is None
            or (not program.kind and not os.path.isfile(os.path.join(folder, program.what)))
            or not os.path.isdir(folder)
            or any(one not in (None, -1) for one in of_others)
        ):
            return None
        try:
            called = b"" if first is None else cloudpickle.dumps(first)
        except Exception:  # its module has what can't be pickled
            return None
        standard = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        others = [fd for fd in kept if fd != wakes]
        # Python treats an stderr on a terminal as any other.
        if any(map(os.isatty, standard[:2])) or len(others) > MOST_DESCRIPTORS:
            return None
        job = Job(
            program,
            command,
            variables,
            [0, 1, 2, *others],
            folder,
            bool(has_session),
            group,
            [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
            [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            called,
        )
        return job, [*standard, *others]

    def start(self, job: Job, descriptors: Sequence[int]) -> int:
        """Have it fork a process; return the process id of the new child of this process.

        Raises:
            RuntimeError: the zygote has ended.
        """
        with self._asking, _adopting():
            try:
                send(self._connection, pickle.dumps(job), descriptors)
                answer, _ = receive(self._connection)
            except OSError as error:
                self.has_failed = True
                raise RuntimeError(f"the zygote of process {os.getpid()} failed") from error
        if not answer:
            self.has_failed = True
            raise RuntimeError(f"the zygote of process {os.getpid()} has ended; see stderr")
        return int(answer)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Let this process be the parent of what its descendants leave behind."""
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _inherited() -> Iterator[bytes]:
    """Give what a child inherits if it is given no environment: C code may have set some of it."""
    variables = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    for number in itertools.count():
        if (variable := variables[number]) is None:
            return
        yield variable


def _pairs(variables: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    for variable in variables:
        name, _, value = variable.partition(b"=")
        yield name, value


def install(get: Callable[[dict[bytes, bytes]], Zygote | None]) -> None:
    """Have `subprocess` and `multiprocessing` ask a zygote for each start of this Python.

    Args:
        get: returns the zygote for such an environment, or None where the start is to be real.
    """
    this_python = [os.fsencode(sys.executable)]

    def start(*given: Any) -> int:
        if [os.fsencode(path) for path in given[1]] == this_python:
            variables = dict(_pairs(_inherited() if given[5] is None else given[5]))
            is_number = variables.get(b"OMP_NUM_THREADS", b"1").isdigit()
            zygote = get(variables) if is_number else None
            if zygote is not None and (asked := zygote.job_of(given, variables)) is not None:
                return zygote.start(*asked)
        return _real_start(*given)

    _start_by(start)


def _start_by(start: Callable[..., int]) -> None:
    vars(_posixsubprocess)["fork_exec"] = start
    vars(subprocess)["_fork_exec"] = start


class WarmStarts:
    """The zygotes of a run of pytest: one for each set of early variables. Thread-safe.

    The first start with another set than that of this process is a real one: many tests try a
    variable once only.

    Args:
        own: the zygote of this process, if that is itself a fork of one: a worker of xdist.
    """

    def __init__(self, own: Zygote | None) -> None:
        self._zygotes: dict[frozenset[tuple[bytes, bytes]], Zygote | None] = {}
        if own is not None:
            self._zygotes[frozenset(own.early.items())] = own
            _start_by(_real_start)  # until a test is given warm starts
        self._others: dict[tuple[Zygote, tuple[str, ...]], Zygote] = {}
        self._is_starting = False
        self._starting = threading.RLock()

    @contextlib.contextmanager
    def given(self, modules: tuple[str, ...] = ()) -> Iterator[None]:
        """Have starts be warm for a while.

        Args:
            modules: what the programs have imported, besides what all warm programs have.
        """
        if not HAS_ZYGOTES:
            yield
            return
        install(lambda variables: self._having(modules, self._fitting(variables)))
        try:
            yield
        finally:
            _start_by(_real_start)

    def _having(self, modules: tuple[str, ...], zygote: Zygote | None) -> Zygote | None:
        if zygote is None or not modules:
            return zygote
        with self._starting:
            other = self._others.get((zygote, modules))
            if other is None or other.has_failed:
                other = self._others[zygote, modules] = zygote.having(modules)
            return other

    def _fitting(self, variables: dict[bytes, bytes]) -> Zygote | None:
        early = read_early(variables)
        key = frozenset(early.items())
        with self._starting:
            if self._is_starting:  # the start of the zygote itself
                return None
            if key not in self._zygotes and early != read_early(dict(_pairs(_inherited()))):
                self._zygotes[key] = None
                return None
            zygote = self._zygotes.get(key)
            if zygote is None or zygote.has_failed:
                self._is_starting = True
                try:
                    zygote = self._zygotes[key] = Zygote.started(variables)
                finally:
                    self._is_starting = False
                atexit.register(zygote.close)
            return zygote
