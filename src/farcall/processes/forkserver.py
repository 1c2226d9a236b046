"""A fork server: a process that imports once what its children need, torch say, and forks them.

It runs no user code, and has one thread when it forks. It ends, with all children, when the process
ends that started it, the driver. That is watched for before anything slow is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from farcall.processes.dying import signal_group
from farcall.threads import FarcallThread

WARM = b"warm"
KILL = b"kill"


class Place(NamedTuple):
    """The descriptors of a child: where it prints to, and its end of the driver's connection."""

    name: str
    out: int
    err: int
    connection: int


def main(connection: int, driver: int, program: str) -> None:
    """Import what children run, fork one for each place, and follow them until all have ended.

    Args:
        connection: descriptor of the connection to the driver.
        driver: process id of the driver.
        program: module whose `run(place, plan, parent)` a child runs. The driver says the plan;
            the parent is this process's id.
    """
    home = Connection(connection)
    gc.disable()  # imports make no garbage; a collector that looks for some takes a tenth of them
    with _ending_with(driver, home):
        module = importlib.import_module(program)
    home.send_bytes(WARM)
    try:
        places, plan = pickle.loads(home.recv_bytes())
    except EOFError:  # the driver has ended
        return
    gc.freeze()  # what the children share of memory is not copied by their collectors
    parent, children = os.getpid(), dict[int, int]()
    # Before the first child can end.
    woken, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_up)
    for number, place in enumerate(places):
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            gc.enable()
            home.close()
            _keep_only(place, places, [woken, wake_up])
            module.run(place, plan, parent)
            return
        children[child] = number
    for place in places:
        _close(place)
    _follow(home, driver, woken, children)


def _follow(home: Connection, driver: int, woken: int, children: dict[int, int]) -> None:
    """Tell the driver how each child ends. If the driver ends or says so, kill all children."""
    with _death_of(driver) as deaths:
        is_wanted = True
        while children:
            ready, _, _ = select.select([home, woken, *deaths] if is_wanted else [woken], [], [])
            if woken in ready:
                os.read(woken, 1 << 16)
                _reap(home, children)
            elif ready:  # KILL, or the end of the driver
                is_wanted = False
                for child in children:
                    signal_group(child, signal.SIGKILL)


def _reap(home: Connection, children: dict[int, int]) -> None:
    for child in list(children):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        signal_group(child, signal.SIGKILL)  # what it has started
        _, status = os.waitpid(child, 0)
        number = children.pop(child)
        with contextlib.suppress(OSError):
            home.send_bytes(pickle.dumps((number, os.waitstatus_to_exitcode(status))))


@contextlib.contextmanager
def _ending_with(driver: int, home: Connection) -> Iterator[None]:
    """End this process at once if the driver ends meanwhile, from which nothing is expected yet."""
    stop, stopped = os.pipe()

    def watch() -> None:
        with _death_of(driver) as deaths:
            ready, _, _ = select.select([home, stop, *deaths], [], [])
            if stop not in ready:
                os._exit(1)

    thread = FarcallThread(watch, "farcall driver watch")
    thread.start()
    try:
        yield
    finally:
        os.close(stopped)
        thread.join()
        os.close(stop)


@contextlib.contextmanager
def _death_of(driver: int) -> Iterator[list[Any]]:
    """Give what becomes readable when the driver ends, beside the end of its connection.

    That does not come while a process that was forked from the driver has it open.
    """
    if not hasattr(os, "pidfd_open"):
        yield []
        return
    try:
        descriptor = os.pidfd_open(driver)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # an old kernel, or a sandbox
        yield []
        return
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def _keep_only(place: Place, places: list[Place], others: list[int]) -> None:
    for other in places:
        if other is not place:
            _close(other)
    for descriptor in others:
        os.close(descriptor)


def _close(place: Place) -> None:
    for descriptor in (place.out, place.err, place.connection):
        os.close(descriptor)


def command(connection: int, program: str) -> list[str]:
    """Return the command that starts a fork server for this process."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from farcall.processes.forkserver import main; "
        f"main({connection}, {os.getpid()}, {program!r})"
    )
    return [sys.executable, "-c", code]
