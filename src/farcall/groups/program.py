"""The program of a worker of `farcall.local`, in a process forked by the fork server.

Importing this module imports all that a worker needs; the fork server does it, once for all.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch

from farcall import rpc
from farcall.groups.joining import join
from farcall.processes.dying import end_with_parent
from farcall.processes.forkserver import ChildDescriptors, import_path

READY = b"ready"
LEAVE = b"leave"


class NoGuard(RuntimeError):
    """The program that starts workers does so wherever it is imported."""


class Plan(NamedTuple):
    """The driver's instructions for all workers.

    Attributes:
        names: of the workers, by rank; the driver comes after them.
        main: what `multiprocessing` needs to make the driver's `__main__` again.
        options: the user's, and where to meet, pickled: they may name members of `__main__`.
        threads: how many threads torch may use in each; None: as the environment says.
    """

    names: tuple[str, ...]
    main: dict[str, Any]
    options: bytes
    threads: int | None


def run(place: ChildDescriptors, plan: Plan, parent: int) -> None:
    """Be a worker until the driver says that it is over, or is gone.

    Args:
        place: which worker, and its descriptors.
        plan: what all workers are told.
        parent: process id of the fork server.
    """
    os.setpgid(0, 0)  # it leads what it starts
    end_with_parent(parent)
    driver = Connection(place.connection)
    _print_to(place)
    torch.seed()  # each fork has the same generators as the others
    if "numpy" in sys.modules:  # else its import will seed them
        sys.modules["numpy"].random.seed()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    try:
        _make_main(plan.main)
        multiprocessing.current_process().name = place.name
        options = pickle.loads(plan.options)
        driver.send_bytes(READY)
        join(place.name, plan.names.index(place.name), len(plan.names) + 1, options)
    except NoGuard as error:
        _fail(driver, str(error))
    except BaseException as error:
        _fail(driver, "".join(traceback.format_exception(error)))
    try:
        driver.recv_bytes()
    except (EOFError, OSError):  # the driver has ended, or wants this at once
        os._exit(1)
    rpc.shutdown()
    _exit()


def _fail(driver: Connection, reason: str) -> NoReturn:
    """Tell the driver why this worker can't start, and end."""
    with contextlib.suppress(OSError):  # the driver has ended
        driver.send_bytes(reason.encode(errors="replace"))
    os._exit(1)


def _exit() -> NoReturn:
    """End as Python does, but leave the memory to the system: to tear torch down takes 0.3 s."""
    process: Any = threading
    process._shutdown()  # waits for threads of the user that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the driver has ended; it was closed
            stream.flush()
    os._exit(0)


def _make_main(data: dict[str, Any]) -> None:
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # `multiprocessing`, too, says then what a script does wrong
    try:
        spawn.prepare(data)
    finally:
        process._inheriting = False


def _print_to(place: ChildDescriptors) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (place.out, 1), (place.err, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    # The output of a function is on its way before its result is.
    sys.stdout = os.fdopen(1, "w", 1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def main_of_this_process() -> dict[str, Any]:
    """Return what `multiprocessing.spawn.prepare` needs to make this process's `__main__` again.

    `spawn.get_preparation_data` would, as well, fix the start method of the user's processes.
    """
    process: Any = multiprocessing.process
    start: str | None = process.ORIGINAL_DIR
    data: dict[str, Any] = {
        "sys_path": [start if path == "" and start else path for path in import_path()],
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "orig_dir": start,
    }
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", None)
    path = getattr(main, "__file__", None)
    if name is not None:
        data["init_main_from_name"] = name
    elif path is not None:
        path = os.path.normpath(os.path.join(start or "", path))
        if os.path.isfile(path):  # it is "<stdin>" where Python reads the program from there
            data["init_main_from_path"] = path
    return data


def threads_of_each(names: Sequence[str]) -> int | None:
    """Return how many threads torch gets in each worker, so that all share this machine's cores."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, torch.get_num_threads() // len(names))
