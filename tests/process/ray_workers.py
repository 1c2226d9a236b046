"""Warm starts of Ray's workers: forks of a server that has imported torch and farcall, not Ray.

A worker of Ray takes three seconds of a core until it runs farcall, nearly all for imports. Its
parent is Ray's own process in C++, so `tests/warm_starts.py` can't start it. The nodes of
`ray_nodes` run this file in place of Ray's `setup_worker.py`: it asks the server for the worker,
and ends when the worker has ended. The worker becomes what `tests/zygote.py` makes of a fork, with
a zygote of its own for the scripts that it starts. It imports Ray itself, since Ray reads variables
of a worker at its import, but not what Ray imports of other packages. A worker that has an
environment of its own, or another PYTHONPATH than the server, starts really.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from zygote_jobs import Job, Program, read_early, receive, send

SERVER = "TESTS_RAY_SERVER"  # the variable of nodes that has what `server` gives
PATH = "TESTS_RAY_PATH"  # the variable of nodes that has the PYTHONPATH of workers
LANGUAGE = "--language=PYTHON"
ENVIRONMENT = "--serialized-runtime-env-context="  # of a worker that is to have one of its own
# What Ray and farcall.ray import. Ray has a psutil of its own.
OTHERS = (
    *("requests", "jsonschema", "google.protobuf.reflection", "yaml", "filelock", "msgpack"),
    *("cryptography.hazmat.primitives.ciphers.aead", "farcall.groups"),
)


@contextmanager
def server(path_of_modules: str) -> Iterator[str]:
    """Run a server for workers that have this PYTHONPATH; give the path of its socket, and that."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder, "server")
        listener.bind(str(path))
        listener.listen(100)
        with subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), path_of_modules],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        ) as process:
            try:
                yield f"{path}{os.pathsep}{path_of_modules}"
            finally:
                process.kill()


def serve(listener: socket.socket, path_of_modules: str) -> Callable[[], None]:
    """Be the server until stdin ends; return in each worker, with the program to run there."""
    sys.path[:0] = path_of_modules.split(os.pathsep)
    import zygote  # noqa: PLC0415

    for module in ("pytest", *OTHERS):  # modules of tests import the first
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import starts a thread, and a fork would lack it")
    this = os.getpid()
    early = read_early({**os.environb, b"PYTHONPATH": os.fsencode(path_of_modules)})
    zygote._variables_here.clear()
    zygote._variables_here.update(early)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for programs
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker stays a zombie
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            data, descriptors = receive(connection)
            if data and os.fork() == 0:
                # Ray does not know the process of a worker that has not yet found its node.
                ctypes.CDLL(None).prctl(zygote.PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != this:
                    os._exit(1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                started = os.dup(connection.detach())  # which stays open until this process ends
                return zygote._become(pickle.loads(data), descriptors, started)
            for one in descriptors:
                os.close(one)
    sys.exit()


def ask(path: str, words: list[str]) -> None:
    """Have the server start the worker of this command line; return when it has ended."""
    command = [os.fsencode(word) for word in (sys.executable, *words)]
    program = Program("", words[0], words, is_unbuffered=False, is_silent=False)
    variables = dict(os.environb)
    job = Job(program, command, variables, [0, 1, 2], os.getcwd(), True, -1, [], [], b"")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        send(connection, pickle.dumps(job), [0, 1, 2])
        connection.recv(1)


def start(words: list[str]) -> None:
    """Start the worker that Ray wants: warm if that can be."""
    if PATH in os.environ:
        os.environ["PYTHONPATH"] = os.environ[PATH]
    path, _, path_of_modules = os.environ.get(SERVER, "").partition(os.pathsep)
    has_its_own = any(word.startswith(ENVIRONMENT) for word in words)
    if path and path_of_modules == os.environ.get("PYTHONPATH") and not has_its_own:
        ask(path, [word for word in words if word != LANGUAGE])
    else:
        real = Path(words[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(real), *words])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", number, path_of_modules]:
            serve(socket.socket(fileno=int(number)), path_of_modules)()
        case words:
            start(words)
