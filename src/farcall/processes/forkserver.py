"""A fork server: a process that imports once what its children need, torch say, and forks them.

It runs no user code, and has one thread when it forks. It ends, with all children, when the process
ends that started it, the driver. It deletes the driver's folder then, since a killed driver can't.
The end of the driver is watched for before anything slow is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

from farcall.plain import plain_text
from farcall.processes.dying import signal_group
from farcall.threads import FarcallThread

WARM = b"warm"
KILL = b"kill"


class ChildDescriptors(NamedTuple):
    """The descriptors of a child: where it prints to, and its end of the driver's connection."""

    name: str
    out: int
    err: int
    connection: int


def main(connection: int, driver: int, program: str, folder: str) -> None:
    """Import what children run, fork one for each place, and follow them until the driver's end.

    Args:
        connection: descriptor of the connection to the driver.
        driver: process id of the driver.
        program: module whose `run(place, plan, parent)` a child runs. The driver says the plan;
            the parent is this process's id.
        folder: of the driver's files; is deleted if the driver ends without a word.
    """
    home = Connection(connection)
    gc.disable()  # imports make no garbage; a collector that looks for some takes a tenth of them
    with _ending_with(driver, home, folder):
        module = importlib.import_module(program)
    try:
        home.send_bytes(WARM)
        said = home.recv_bytes()
    except (EOFError, OSError):  # the driver has ended
        shutil.rmtree(folder, ignore_errors=True)
        return
    if said == KILL:
        return
    places, plan = pickle.loads(said)
    gc.freeze()  # what the children share of memory is not copied by their collectors
    parent, children = os.getpid(), dict[int, int]()
    # Before the first child can end.
    woken, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_up)
    masked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # as the driver has it
    for number, place in enumerate(places):
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            gc.enable()
            home.close()
            _keep_only(place, places, [woken, wake_up])
            module.run(place, plan, parent)
            return
        with contextlib.suppress(OSError):  # the child does so, too, and may have ended
            os.setpgid(child, child)  # before a KILL, which is for the group that it leads
        children[child] = number
    for place in places:
        _close(place)
    if not _follow(home, driver, woken, children):
        shutil.rmtree(folder, ignore_errors=True)


def _follow(home: Connection, driver: int, woken: int, children: dict[int, int]) -> bool:
    """Tell the driver how each child ends. If the driver ends or says so, kill all children.

    Returns:
        Whether the driver still lives when all children have ended.
    """
    with _death_of(driver) as deaths:
        is_wanted = True
        while is_wanted or children:
            ready = _readable([home.fileno(), woken, *deaths] if is_wanted else [woken])
            if woken in ready:
                os.read(woken, 1 << 16)
                _reap(home, children)
            elif ready:  # KILL, or the end of the driver
                is_wanted = False
                if home.fileno() in ready:
                    with contextlib.suppress(EOFError, OSError):
                        home.recv_bytes()
                for child in children:
                    signal_group(child, signal.SIGKILL)
        # After KILL nothing more comes but the end.
        return not _readable([home.fileno(), *deaths], 0.0)


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
def _ending_with(driver: int, home: Connection, folder: str) -> Iterator[None]:
    """End this process at once if the driver ends meanwhile, or says so, and delete its folder."""
    stop, stopped = os.pipe()

    def watch() -> None:
        with _death_of(driver) as deaths:
            if stop not in _readable([home.fileno(), stop, *deaths]):
                shutil.rmtree(folder, ignore_errors=True)
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
def _death_of(driver: int) -> Iterator[list[int]]:
    """Give what becomes readable when the driver ends, beside the end of its connection.

    That does not come while a process that was forked from the driver has it open.
    """
    if not hasattr(os, "pidfd_open"):
        yield []
        return
    try:
        descriptor = os.pidfd_open(driver)
    except ProcessLookupError:  # it has ended already: the end of a pipe is readable, too
        descriptor, writer = os.pipe()
        os.close(writer)
    except OSError:  # an old kernel, or a sandbox
        yield []
        return
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def _readable(descriptors: list[int], seconds: float | None = None) -> set[int]:
    """Wait until some are readable, or have ended; return which. `select` knows 1024 only."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {one for one, _ in poller.poll(None if seconds is None else seconds * 1000)}


def _keep_only(place: ChildDescriptors, places: list[ChildDescriptors], others: list[int]) -> None:
    for other in places:
        if other is not place:
            _close(other)
    for descriptor in others:
        os.close(descriptor)


def _close(place: ChildDescriptors) -> None:
    for descriptor in (place.out, place.err, place.connection):
        os.close(descriptor)


def import_path() -> list[str]:
    """Return the entries of `sys.path` that are text; others have no effect."""
    return [plain_text(place) for place in sys.path if isinstance(place, str)]


def command(connection: int, program: str, folder: str) -> list[str]:
    """Return the command that starts a fork server for this process; see `main`."""
    code = (
        f"import sys; sys.path[:] = {import_path()!r}; "
        "from farcall.processes.forkserver import main; "
        f"main({connection}, {os.getpid()}, {program!r}, {folder!r})"
    )
    return [sys.executable, "-c", code]
