"""Real processes that do what a test tells them, one step at a time.

They are forked from a server that has imported all that takes long already, so that one starts in a
tenth of a second. A step is a function of a test module and its arguments; it runs in the main
thread of the process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from patience import PATIENCE

from farcall import rpc

_context = multiprocessing.get_context("forkserver")
# A step of a test module has its member import pytest, and a secret the library for TLS.
_context.set_forkserver_preload(["torch", "farcall.rpc", "pytest", "cryptography.x509"])

Step = Callable[..., Any]
# So many processes at once would leave a test that runs beside them a few milliseconds per second.
CROWD, LEAST_SHARE = 20, 19


class Member:
    """One process."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, environment), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, step: Step, *args: Any, **kwargs: Any) -> None:
        """Begin a step; `result` waits for it."""
        self._pipe.send((step, args, kwargs))

    def result(self) -> Any:
        """Return the result of the step. Raises its error."""
        if not self._pipe.poll(PATIENCE):
            self.show_stacks()
            raise AssertionError(f"{self.name} did not finish its step in {PATIENCE} s")
        error, value = self._pipe.recv()
        if error is not None:
            raise error
        return value

    def run(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        self.start(step, *args, **kwargs)
        return self.result()

    def fails(self) -> BaseException:
        """Return the error of the step."""
        try:
            value = self.result()
        except AssertionError:
            raise
        except BaseException as error:
            return error
        raise AssertionError(f"{self.name} did not fail but returned {value!r}")

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped: the signal alone says only "soon"."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
            try:
                if all(task.read_text().rpartition(")")[2].split()[0] in "Tt" for task in tasks):
                    return
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread ended before it stopped
        raise AssertionError(f"{self.name} did not stop")

    def show_stacks(self) -> None:
        """Have the stacks of its threads written to stderr, soon."""
        self.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has closed everything it had."""
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE)

    def end(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
            self.process.join(PATIENCE)
        self._pipe.close()
        self.process.close()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    for name in [name for name in os.environ if name in _CLEARED or name.startswith("FARCALL_")]:
        del os.environ[name]
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends this one
    while True:
        try:
            step, args, kwargs = pipe.recv()
        except EOFError:
            return
        outcome: tuple[BaseException | None, Any]
        try:
            outcome = (None, step(*args, **kwargs))
        except BaseException as error:
            error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
            outcome = (error, None)
        try:
            data = pickle.dumps(outcome)
        except Exception as error:
            data = pickle.dumps((TypeError(f"{outcome!r} can't be pickled: {error}"), None))
        pipe.send_bytes(data)


_CLEARED = {
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "USE_LIBUV",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
}  # fmt: skip


class Crew:
    """Starts members, and ends them with the test."""

    def __init__(self, file: str) -> None:
        self.init_method = f"file://{file}"
        self._members: list[Member] = []

    def member(self, name: str = "", **environment: str) -> Member:
        self._members.append(Member(name or f"w{len(self._members)}", environment))
        return self._members[-1]

    def members(self, count: int, **environment: str) -> list[Member]:
        return [self.member(**environment) for _ in range(count)]

    def group(self, count: int, **options: Any) -> list[Member]:
        """Members w0, w1, ... that have called `init_rpc`."""
        members = self.members(count)
        if count >= CROWD:
            for member in members:
                member.run(os.nice, LEAST_SHARE)
        for rank, member in enumerate(members):
            member.start(join, member.name, rank, count, self.init_method, **options)
        for member in members:
            member.result()
        return members

    def end(self) -> None:
        for member in self._members:
            member.end()


@contextmanager
def assembled(file: str) -> Iterator[Crew]:
    crew = Crew(file)
    try:
        yield crew
    finally:
        crew.end()


# Steps that many tests use.


def join(
    name: str, rank: int, world_size: int | None, init_method: str = "env://", **options: Any
) -> None:
    options.setdefault("rpc_timeout", PATIENCE)
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=init_method, **options),
    )


def leave(**how: Any) -> float:
    """Shut down; how many seconds it took."""
    start = time.monotonic()
    rpc.shutdown(**how)
    return time.monotonic() - start


def call(to: str | int, function: Step, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args, **kwargs)


def leave_all(*members: Member) -> None:
    """Shut all these down, gracefully."""
    for member in members:
        member.start(leave)
    for member in members:
        member.result()


def check_all_left(*members: Member) -> None:
    """Check that these have shut down: they find no agent to shut down once more."""
    for member in members:
        member.start(leave)
        error = member.fails()
        assert isinstance(error, rpc.NotInitialized), error
