"""The time from nothing to the first call of workers.

A process with all imports done forks the workers, so that Python's own start is not timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from plans import World
from workers import CONTEXT, end_with_parent, join, module_of


def noop() -> None:
    pass


def work(implementation: str, store: str, world: World, rank: int, starter: Connection) -> None:
    """Do the work of a forked process."""
    end_with_parent()
    starter.send("ready")
    starter.recv()
    rpc = join(implementation, store, world, rank)
    if rank == 0:
        rpc.rpc_sync("worker1", noop)
        starter.send("answered")
    rpc.shutdown()


def receive(connection: Connection, processes: list[BaseProcess]) -> None:
    """Waits for a message. Raises RuntimeError if a process fails first."""
    while True:
        running = [process.sentinel for process in processes if process.is_alive()]
        check(processes)
        if connection in wait([connection, *running]):
            connection.recv()
            return


def check(processes: list[BaseProcess]) -> None:
    for rank, process in enumerate(processes):
        if process.exitcode:
            raise RuntimeError(f"rank {rank} ended with {process.exitcode}")


def start(implementation: str, world: World, store: str) -> float:
    """Seconds from the word to go, for which all processes wait, to the first answer."""
    pipes = [CONTEXT.Pipe() for _ in range(world.size)]
    processes = [
        CONTEXT.Process(target=work, args=(implementation, store, world, rank, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    ours = [connection for connection, _ in pipes]
    for process in processes:
        process.start()
    for connection in ours:
        receive(connection, processes)
    begin = time.perf_counter()
    for connection in ours:
        connection.send("go")
    receive(ours[0], processes)
    seconds = time.perf_counter() - begin
    for process in processes:
        process.join()
    check(processes)
    return seconds


def seconds_to_first_call(implementation: str, size: int) -> Iterator[float]:
    """Seconds of one start of `size` workers after another."""
    module_of(implementation)
    while True:
        with tempfile.TemporaryDirectory() as folder:
            yield start(implementation, World(size), str(Path(folder, "store")))
