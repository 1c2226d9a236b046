"""The actor that is a worker of a group, in a process of Ray."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import cloudpickle
import ray

from farcall import rpc
from farcall.groups.joining import START_SECONDS, join
from farcall.processes.dying import Guardian, start, wait_for_group
from farcall.processes.output import KEPT_LINES
from farcall.ray.sealing import Seal
from farcall.runtime.membership.stores import connect_to_store

_AT_MOST = 1 << 20  # bytes of a file
_MARKS = (":actor_name:", ":job_id:", ":task_name:")  # that Ray puts between the lines, for itself


class Seat(NamedTuple):
    """A worker's place in its group.

    Attributes:
        rank: its number.
        size: how many they are, with the driver.
        host, port: of the store where they meet.
    """

    rank: int
    size: int
    host: str
    port: int


class WorkerArrival(NamedTuple):
    """A worker's words about itself when its process is there.

    Attributes:
        key: that the options for it are to be sealed with.
        node: of Ray, where it runs.
        logs: paths of the files there that Ray keeps what it prints in; none if the system does
            not say it.
    """

    key: bytes
    node: str
    logs: tuple[str, ...]


class FarcallWorker:
    """A worker, or what runs one. Ray runs other methods while `work` runs: it needs threads.

    Args:
        name: of the worker. Ray prints it before what the worker prints.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seal = Seal()
        self._is_over = threading.Event()

    def __repr__(self) -> str:
        return self._name

    def arrive(self) -> WorkerArrival:
        """Return where this worker is, and how to seal its options."""
        files = (os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2))
        logs = tuple(path for path in files if os.path.isfile(path))
        return WorkerArrival(self._seal.public, ray.get_runtime_context().get_node_id(), logs)

    def last_lines(self, logs: Sequence[str]) -> list[str]:
        """Return the end of the files that this worker prints to: see `last_lines`."""
        return last_lines(logs)

    def work(self, seat: Seat, sealed: bytes) -> None:
        """Join the group, serve until `leave` is called, leave the group, and end the process.

        Args:
            seat: where to join.
            sealed: keywords of `RpcBackendOptions`, the secret among them.

        Raises:
            Exception: this worker can't join.
        """
        hint = "; is the driver running, and can this node reach it?"
        store = connect_to_store(seat.host, seat.port, START_SECONDS, hint=hint)
        options = {**cloudpickle.loads(self._seal.open(sealed)), "store": store}
        join(self._name, seat.rank, seat.size, options, ray.util.get_node_ip_address())
        self._is_over.wait()
        rpc.shutdown()
        ray.actor.exit_actor()

    def run(self, folder: str | None, sealed: bytes) -> int:
        """Run a program in a process that ends with this one; return its exit code.

        Args:
            folder: to run it in; None: where Ray has put this process.
            sealed: arguments for Python, and variables of the environment, the secret among them.
        """
        command, variables = pickle.loads(self._seal.open(sealed))
        variables["FARCALL_LISTEN"] = ray.util.get_node_ip_address()
        if folder is not None:
            os.chdir(folder)
        guardian = Guardian()  # first: this process may be killed as soon as the program runs
        process = start(
            [sys.executable, *command], {**os.environ, **variables}, stdout=None, stderr=None
        )
        guardian.watch(process.pid)
        code = wait_for_group(process)
        guardian.release(process.pid)
        guardian.close()
        return code

    def leave(self) -> None:
        """Let `work` come to its end."""
        self._is_over.set()


def last_lines(logs: Sequence[str], most: int = KEPT_LINES) -> list[str]:
    """Return the last lines that a worker has printed to stdout, and then those to stderr.

    Args:
        logs: paths of files on this machine. The last MiB of each counts.
        most: how many lines.
    """
    found: list[str] = []
    for path in logs:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _AT_MOST))
            text = file.read().decode(errors="replace")
        found += [line for line in text.splitlines() if not line.startswith(_MARKS)]
    return found[-most:]
