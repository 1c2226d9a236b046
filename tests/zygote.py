"""Warm starts: Python processes that are forked from a process that has imported torch and farcall.

Importing torch takes two seconds of a core, and a test of three workers starts five processes. In
tests, `subprocess` and `multiprocessing` ask a zygote for each process that would run this Python:
it forks itself, and the fork runs the program as `__main__`, with the arguments, environment,
folder, descriptors, session and signals that it was to get. The new process is a child of the
process that asked, has a zygote of its own, and so its children start warm, too.

A start that a fork can't stand for is a real one: see `_program` and `READ_EARLY`. So are all
starts of tests with the marker `cold`, and all starts if TESTS_COLD is set.

    starter --- asks ---> its zygote --- forks ---> middle --- forks ---> program
       ^                                           (ends)                    |
       +------------------- parent, once the middle has ended ---------------+
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from patience import PATIENCE
from warm_starts import Zygote, install
from zygote_ends import end_shortly, end_wholly, expect, keep_imports
from zygote_jobs import BOOT, Job, Preloads, Program, is_compat, read_early, receive, send

# An optimizer of torch imports Dynamo, which takes as long as the rest of torch.
PRELOADED = (
    *("torch", "torch._dynamo", "farcall.rpc", "farcall.optim", "farcall.cli.commands"),
    "pytest",  # modules of tests, from which workers take functions, import it
)
IN_THE_WAY = 600  # no test has so many descriptors
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
WHOLE_END = b"TESTS_WHOLE_END"  # a program with this variable ends as after a real start
EVERY_MAIN_HAS = {"__name__", "__doc__", "__package__", "__loader__", "__spec__"}
EVERY_MAIN_HAS |= {"__annotations__", "__builtins__"}
_variables_here: dict[bytes, bytes] = {}


def serve(descriptor: int) -> Callable[[], None]:
    """Be the first zygote; return in each process that it forks, with the program to run there."""
    _variables_here.update(read_early(os.environb))
    return _serve_having(PRELOADED, descriptor)


def _serve_having(modules: Sequence[str], descriptor: int) -> Callable[[], None]:
    """Be a zygote that has imported these modules, too."""
    for module in modules:
        importlib.import_module(module)
    for thread in threading.enumerate()[1:]:
        thread.join(PATIENCE)  # a timer of Matplotlib ends with its first import on a machine
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {modules} starts a thread, and a fork would lack it")
    keep_imports()
    gc.collect()
    gc.freeze()  # else the collectors of all forks copy what they share
    return _serve(socket.socket(fileno=descriptor))


def _serve(connection: socket.socket) -> Callable[[], None]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for programs
    while True:
        data, descriptors = receive(connection)
        if not data:
            os._exit(0)
        asked = pickle.loads(data)
        if isinstance(asked, Preloads):
            if os.fork() == 0:
                connection.close()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                return _serve_having(asked.modules, *descriptors)
            for other in descriptors:
                os.close(other)
            continue
        told, tell = os.pipe()
        held, release = os.pipe()
        middle = os.fork()
        if middle == 0:
            program = os.fork()
            if program != 0:
                os.write(tell, str(program).encode())
                os._exit(0)
            connection.close()
            for other in (told, release):
                os.close(other)
            if not os.read(held, 1):
                os._exit(1)
            os.close(held)
            return _become(asked, descriptors, tell)
        os.waitpid(middle, 0)  # the process that asked is the parent of the program now
        number = os.read(told, 20)
        os.close(tell)
        os.write(release, b"!")
        # To its end: a real start, too, returns when the process has its session and signals.
        os.read(told, 1)
        for other in (told, held, release, *descriptors):
            os.close(other)
        send(connection, number)


def _become(job: Job, descriptors: Sequence[int], started: int) -> Callable[[], None]:
    """Turn this fork into what a real start would have made; return the program to run.

    The descriptor `started` is closed when others see the process as after a real start.
    """
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
        return _serve_with(parent, theirs, (*descriptors, started))
    theirs.close()
    with ours:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, IN_THE_WAY)
    high_started = fcntl.fcntl(started, fcntl.F_DUPFD_CLOEXEC, IN_THE_WAY)
    os.close(started)
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
    os.close(high_started)
    own = Zygote(socket.socket(fileno=high), _variables_here)
    Zygote.of_this_process = own
    install(lambda variables: own if own.early == read_early(variables) else None)
    _set_up(job)
    if WHOLE_END in job.environment:
        end_wholly()
    else:
        end_shortly()
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
    tempfile.tempdir = None  # found anew, by TMPDIR
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # not done by a fork
    sys.modules["numpy"].random.seed()
    if threads := job.environment.get(b"OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    if is_compat(job.environment):
        _stand_in()


def _stand_in() -> None:
    """Let farcall be torch.distributed.rpc, as a real start does when it has imported torch."""
    others = sys.path[:]
    sys.path[:] = [BOOT]  # else the module would run another one of its name for the second time
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    sys.path += others
    sys.meta_path.pop(0)  # it would wait for the import of torch
    importlib.import_module("farcall.compat").install()


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
            exec(compile(program.what, "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(program.what)))
            file = os.path.join(os.getcwd(), program.what)
            loader = SourceFileLoader("__main__", file)
            vars(main).update(__file__=file, __cached__=None, __loader__=loader)
            code = compile(Path(program.what).read_bytes(), file, "exec", dont_inherit=True)
            exec(code, main.__dict__)
    except SystemExit as end:
        expect(end.code)
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None  # Python only chooses the exit code now
        raise
    else:
        expect(None)
