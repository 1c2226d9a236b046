"""A worker whose process forks, by C and by Python: `test_forks.py` starts it, and kills it.

Arguments: the transport and its path, how to fork, and the peer as JSON. It prints who it is; when
it is told to go on, it forks, prints the pids of what it has forked, and sleeps.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import os
import sys
from functools import partial

from stations import SocketNet, Station, echo, request, soon

from farcall.ids import Worker

PATHS = {"shm": ("shm", "unix", "tcp"), "unix": ("unix", "tcp")}
LARGE = bytes(3000)
# Keeps the GIL: no other thread of Python has it when the child begins.
libc = ctypes.PyDLL(None)


def say(what: object) -> None:
    """Print a line in one step: another process may print into the same pipe at the same time."""
    os.write(1, f"{what}\n".encode())


def net_of(kind: str) -> SocketNet:
    """`"native shm"`, `"native striped"`, `"socket tcp"` and so on."""
    transport, _, path = kind.partition(" ")
    paths = PATHS.get(path, ("tcp",))
    by = "unix" if "unix" in paths else "tcp"
    if transport == "socket":
        return SocketNet(None, by, paths=paths)
    from farcall.transport.native.endpoint import NativeEndpoint  # noqa: PLC0415 -- if it was compiled

    if path != "striped":
        return SocketNet(None, by, NativeEndpoint, paths=paths)
    make = partial(NativeEndpoint, stripe_threshold=1000, stripe_chunk=300)
    return SocketNet(None, by, make, paths=paths, streams=4)


def as_json(worker: Worker) -> str:
    return json.dumps([worker.name, worker.id, worker.incarnation, list(worker.addresses)])


def from_json(text: str) -> Worker:
    name, number, incarnation, addresses = json.loads(text)
    return Worker(name, number, incarnation, tuple(addresses))


def sleep() -> None:
    while True:
        libc.pause()


def fork_by_c() -> int:
    child: int = libc.fork()
    if not child:
        sleep()
    return child


def fork_by_python() -> int:
    child = os.fork()
    if not child:
        sleep()
    return child


def fork_again_by_c() -> None:
    say(fork_by_c())
    sleep()


def fork_by_multiprocessing() -> int:
    """Fork in Python's way; the child goes on in Python, and forks by C.

    Not the other way round: a child that C has forked may find locks of Python held by threads that
    don't exist there.
    """
    child = multiprocessing.get_context("fork").Process(target=fork_again_by_c)
    child.start()
    assert child.pid is not None
    return child.pid


WAYS = {
    "c": fork_by_c,
    "python": fork_by_python,
    "multiprocessing": fork_by_multiprocessing,
}


def main(kind: str, way: str, peer: str) -> None:
    near: Station = net_of(kind).station("near")
    near.read(echo)
    link = near.endpoint.connect(from_json(peer), soon())
    until = soon()
    for number in itertools.count():
        link.exchange(request(number, b"", [LARGE]), until)
        if kind != "native striped" or getattr(link, "streams", 1) == 4:
            break  # else the further streams are on their way
    say(as_json(near.worker))
    sys.stdin.readline()
    say(WAYS[way]())
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
