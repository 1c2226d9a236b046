"""Warm starts: Python processes that are forked from a process that has imported torch and farcall.

Importing torch takes two seconds of a core, and a test of three workers starts five processes. In a
test with the marker `warm`, `subprocess` and `multiprocessing` ask a zygote for each process that
would run this Python: it forks itself, and the fork runs the program as `__main__`, with the
arguments, environment, folder, descriptors, session and signals that it was to get. The new process
is a child of the process that asked, has a zygote of its own, and so its children start warm, too.

A start that a fork can't stand for is a real one: see `_program` and `READ_EARLY`. So are all
starts of tests without the marker, and all starts if TESTS_COLD is set.

    starter --- asks ---> its zygote --- forks ---> middle --- forks ---> program
       ^                                           (ends)                    |
       +------------------- parent, once the middle has ended ---------------+
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
from patience import PATIENCE

PRELOADED = ("torch", "farcall", "farcall.cli.commands")
# Python, the loader and torch's libraries read these before a program begins. A start that changes
# one is a real start.
READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GOMP_", "KMP_", "MKL_", "TORCH_", "ATEN_")
READ_LATER = {"PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
WITHOUT_TORCH = "from multiprocessing.resource_tracker import"  # there sooner by a real start
PADDING = "x" * (1 << 16)  # room in which a process keeps its command line and environment
IN_THE_WAY = 600  # no test has so many descriptors
MOST_DESCRIPTORS = 200  # of one message; Linux allows 253
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37  # <sys/prctl.h>

_real_start: Callable[..., int] = _posixsubprocess.fork_exec
_HAS_ZYGOTES = sys.platform == "linux" and not os.environ.get("TESTS_COLD")
EVERY_MAIN_HAS = {"__name__", "__doc__", "__package__", "__loader__", "__spec__"}
EVERY_MAIN_HAS |= {"__annotations__", "__builtins__"}
_MAIN = """
import sys
sys.path[0] = sys.argv[2]
import zygote
del sys.path[0]
zygote.serve(int(sys.argv[1]))()
"""


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


def _program(command: Sequence[bytes]) -> Program | None:
    """Return what a command line of Python runs, or None if only a real start can tell."""
    words = [os.fsdecode(word) for word in command[1:]]
    is_unbuffered = is_silent = False
    while words:
        match words:
            case ["-B", *words] if sys.dont_write_bytecode:  # as multiprocessing hands it on
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


class Zygote:
    """The zygote of this process: forks processes that become children of this one. Thread-safe.

    Args:
        connection: to the zygote.
        base: the environment in which the zygote has imported what it has.
        process: the zygote, if it is a child that this process has to wait for.
    """

    def __init__(
        self,
        connection: socket.socket,
        base: Mapping[bytes, bytes],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._connection = connection
        self._base = base
        self._process = process
        self._owner = (os.getpid(), os.getsid(0), os.getpgrp())
        self._asking = threading.Lock()
        self.has_failed = False
        connection.settimeout(PATIENCE)

    @classmethod
    def started(cls) -> Zygote:
        """Start one for a process that has none."""
        ours, theirs = socket.socketpair()
        base = {name: value for name, value in os.environb.items() if name != b"OMP_NUM_THREADS"}
        with theirs:
            more = [str(theirs.fileno()), str(Path(__file__).parent), PADDING]
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, *more],
                pass_fds=[theirs.fileno()],
                # It forks, and must have one thread only.
                env={**base, b"OPENBLAS_NUM_THREADS": b"1", b"PADDING": PADDING.encode()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        return cls(ours, base, process)

    def close(self) -> None:
        """End it; what it has forked lives on."""
        self._connection.close()
        if self._process is not None:
            self._process.kill()  # a fork of this process may have the connection open
            self._process.wait()

    def job_of(self, given: Sequence[Any]) -> tuple[Job, list[int]] | None:
        """Return what to ask for in place of a start, with descriptors; None for a real start.

        Args:
            given: the arguments of `_posixsubprocess.fork_exec`.
        """
        command, executables, close_fds, kept, folder, variables = given[:6]
        pipes, wakes = (given[6], given[9], given[11]), given[13]
        has_session, group, *of_others, first = given[15:22]
        command = [os.fsencode(word) for word in command]
        program = _program(command)
        listed = dict(_pairs(_inherited() if variables is None else variables))
        folder = os.fsdecode(folder) if folder is not None else os.getcwd()
        if (
            [os.fsencode(path) for path in executables] != [os.fsencode(sys.executable)]
            or self._owner != (os.getpid(), os.getsid(0), os.getpgrp())
            or not close_fds
            or program is None
            or (not program.kind and not os.path.isfile(os.path.join(folder, program.what)))
            or not os.path.isdir(folder)
            or self._is_read_early(listed)
            or any(one not in (None, -1) for one in of_others)
        ):
            return None
        try:
            called = b"" if first is None else cloudpickle.dumps(first)
        except Exception:  # its module has what can't be pickled
            return None
        standard = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        others = [fd for fd in kept if fd != wakes]
        if any(map(os.isatty, standard)) or len(others) > MOST_DESCRIPTORS:
            return None
        job = Job(
            program,
            command,
            listed,
            [0, 1, 2, *others],
            folder,
            bool(has_session),
            group,
            [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
            [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            called,
        )
        return job, [*standard, *others]

    def _is_read_early(self, variables: Mapping[bytes, bytes]) -> bool:
        """Return whether the variables have one that an import or a library would have read."""
        changed = (
            os.fsdecode(name)
            for name in variables.keys() | self._base.keys()
            if variables.get(name) != self._base.get(name)
        )
        if any(name.startswith(READ_EARLY) and name not in READ_LATER for name in changed):
            return True
        return not variables.get(b"OMP_NUM_THREADS", b"1").isdigit()

    def start(self, job: Job, descriptors: Sequence[int]) -> int:
        """Have it fork a process; return the process id of the new child of this process.

        Raises:
            RuntimeError: the zygote has ended.
        """
        with self._asking, _adopting():
            try:
                _send(self._connection, pickle.dumps(job), descriptors)
                answer, _ = _receive(self._connection)
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


def _send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [struct.pack("!I", len(data))], descriptors)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors, or nothing at the end of the connection."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, MOST_DESCRIPTORS + 3)
    if not head:
        return b"", []
    with connection.makefile("rb") as stream:
        return stream.read(struct.unpack("!I", head)[0]), descriptors


# What follows runs in zygotes and in what they fork.

_base: dict[bytes, bytes] = {}


def serve(descriptor: int) -> Callable[[], None]:
    """Be the first zygote; return in each process that it forks, with the program to run there."""
    _base.update(os.environb)
    for name in (b"PADDING", b"OPENBLAS_NUM_THREADS"):
        del _base[name]
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else the collectors of all forks copy what they share
    return _serve(socket.socket(fileno=descriptor))


def _serve(connection: socket.socket) -> Callable[[], None]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for programs
    while True:
        data, descriptors = _receive(connection)
        if not data:
            os._exit(0)
        told, tell = os.pipe()
        held, release = os.pipe()
        middle = os.fork()
        if middle == 0:
            program = os.fork()
            if program != 0:
                os.write(tell, str(program).encode())
                os._exit(0)
            connection.close()
            for other in (told, tell, release):
                os.close(other)
            if not os.read(held, 1):
                os._exit(1)
            os.close(held)
            return _become(pickle.loads(data), descriptors)
        os.waitpid(middle, 0)  # the process that asked is the parent of the program now
        number = os.read(told, 20)
        os.write(release, b"!")
        for other in (told, tell, held, release, *descriptors):
            os.close(other)
        _send(connection, number)


def _become(job: Job, descriptors: Sequence[int]) -> Callable[[], None]:
    """Turn this fork into what a real start would have made; return the program to run."""
    if job.has_session:
        os.setsid()
    elif job.group >= 0:
        os.setpgid(0, job.group)
    os.chdir(job.folder)
    if job.first:
        pickle.loads(job.first)()
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        return _serve_with(parent, theirs, descriptors)
    theirs.close()
    with ours:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, IN_THE_WAY)
    _take(job.targets, descriptors)
    for number in range(1, signal.NSIG):
        if number in job.ignored:
            signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in job.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, job.blocked)
    os.environ.clear()  # the C library, too, has nothing in the room of the old one any more
    os.environb.update(job.environment)
    _show(job.command, job.environment)
    install(Zygote(socket.socket(fileno=high), _base))
    _set_up(job)
    return lambda: _run(job.program)


def _serve_with(
    parent: int, connection: socket.socket, others: Sequence[int]
) -> Callable[[], None]:
    """Be the zygote of a program, as long as that lives."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for other in others:
        os.close(other)
    return _serve(connection)


def _take(targets: Sequence[int], descriptors: Sequence[int]) -> None:
    """Give descriptors the numbers that they are to have."""
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, IN_THE_WAY) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for target, one in zip(targets, high, strict=True):
        os.dup2(one, target)
        os.close(one)


def _show(command: Sequence[bytes], environment: Mapping[bytes, bytes]) -> None:
    """Have /proc show the command line and the environment: in the room that Linux shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    command_at, command_end, environment_at, environment_end = map(int, fields[45:49])
    _overwrite(command_at, command_end, command)
    variables = [name + b"=" + value for name, value in environment.items()]
    _overwrite(environment_at, environment_end, variables)


def _overwrite(begin: int, end: int, texts: Sequence[bytes]) -> None:
    data = b"".join(text + b"\0" for text in texts)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, data, len(data))


def _set_up(job: Job) -> None:
    """Set what Python and torch take from their command line and environment at the start."""
    program = job.program
    sys.orig_argv[:] = map(os.fsdecode, job.command)
    sys.argv[:] = program.argv
    if program.is_silent:
        sys.warnoptions.append("ignore")
        warnings.simplefilter("ignore")
    if program.is_unbuffered or job.environment.get(b"PYTHONUNBUFFERED"):
        for name, number in (("stdout", 1), ("stderr", 2)):
            old = getattr(sys, name)
            raw: Any = io.FileIO(number, "w", closefd=False)
            new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
    sys.modules["numpy"].random.seed()
    if threads := job.environment.get(b"OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))


def _run(program: Program) -> None:
    """Run a program as `__main__`; show the traceback that a real start would have shown."""
    main = sys.modules["__main__"]  # the same module: farcall, for one, has imported it
    for name in main.__dict__.keys() - EVERY_MAIN_HAS:
        delattr(main, name)
    try:
        if program.kind == "-m":
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(program.what)  # type: ignore[attr-defined]
        elif program.kind == "-c":
            sys.path.insert(0, "")
            exec(compile(program.what, "<string>", "exec"), main.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(program.what)))
            main.__file__, main.__cached__ = os.path.join(os.getcwd(), program.what), None
            main.__loader__ = SourceFileLoader("__main__", main.__file__)
            code = compile(Path(program.what).read_bytes(), main.__file__, "exec")
            exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None  # Python only chooses the exit code now
        raise


# What follows runs in processes that start others.


def install(zygote: Zygote | None) -> None:
    """Have `subprocess` and `multiprocessing` ask a zygote; None has them start really again."""

    def start(*given: Any) -> int:
        asked = None if zygote is None else zygote.job_of(given)
        return _real_start(*given) if zygote is None or asked is None else zygote.start(*asked)

    new = _real_start if zygote is None else start
    vars(_posixsubprocess)["fork_exec"] = new
    vars(subprocess)["_fork_exec"] = new


class WarmStarts:
    """The zygote of a run of pytest, there from the first test that has the marker."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Have starts be warm for a while. If a zygote fails, the next test has another."""
        if not _HAS_ZYGOTES:
            yield
            return
        if self._zygote is None or self._zygote.has_failed:
            self._zygote = Zygote.started()
            atexit.register(self._zygote.close)
        install(self._zygote)
        try:
            yield
        finally:
            install(None)
