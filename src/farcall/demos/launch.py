"""Starts a demo's worker processes, follows them, and sees to it that all of them end.

However a run ends, by itself, by Ctrl-C, or by the death of a worker, no process is left. On Ctrl-C
the training worker is asked to stop as soon as it can, so that all workers leave as they do when
the training is done. The workers themselves don't see Ctrl-C: a terminal sends it to all of them at
once, and only this process should decide.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from farcall.demos.progress import Monitor, WorkerStarted

P = TypeVar("P")

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.2


class Training(Generic[P]):
    """The knowledge of a run so far.

    Attributes:
        history: the progress that was reported, in order.
        failure: which worker process raised or died, and how; None while none did.
        interrupted: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.history: list[P] = []
        self.failure: str | None = None
        self.interrupted = False

    def outcome(self, otherwise: str) -> str:
        """Return the run's end: "failed", "interrupted", or `otherwise` if it was neither."""
        if self.failure:
            return "failed"
        return "interrupted" if self.interrupted else otherwise


class Run(Training[P]):
    """A run in worker processes, which all have to live to its end."""

    def __init__(
        self,
        show: Callable[[P], None],
        grace_seconds: float = GRACE_SECONDS,
        show_started: Callable[[int, int], None] = lambda started, workers: None,
    ) -> None:
        """Prepare a run.

        Args:
            show: is called with all progress.
            grace_seconds: what Ctrl-C leaves the workers to stop.
            show_started: is called with how many workers have started, and how many there are.
        """
        super().__init__()
        self._show = show
        self._show_started = show_started
        self._started = 0
        self._grace_seconds = grace_seconds
        self._interrupts = 0
        self._stop_by: float | None = None

    def launch(self, worker: Callable[..., None], options: object, world_size: int) -> None:
        """Runs `worker(rank, options, init_method, monitor)` in `world_size` processes.

        They find each other through a file. Returns when all of them have ended, by themselves or
        because one raised or died (`failure` says so). Call it once, in the main thread: signals
        are handled there.
        """
        folder = tempfile.TemporaryDirectory(prefix="farcall-demo-", ignore_cleanup_errors=True)
        with folder as path, on_interrupt(self._count_interrupt):
            self._start(worker, options, world_size, Path(path, "rendezvous").as_uri())
            self._follow()

    def _start(
        self, worker: Callable[..., None], options: object, world_size: int, init_method: str
    ) -> None:
        self._connection, theirs = mp.get_context("spawn").Pipe()
        self._workers = world_size
        self._show_started(0, world_size)
        arguments = (worker, options, init_method, Monitor[P](theirs))
        with theirs, interrupts_blocked():
            self._processes = spawn(  # type: ignore[no-untyped-call]
                _begin, args=arguments, nprocs=world_size, join=False, daemon=True
            )

    def _follow(self) -> None:
        try:
            while not self._ended():
                wait([self._connection, *self._processes.sentinels], POLL_SECONDS)
                self._receive()
        except (ProcessExitedException, ProcessRaisedException) as failure:
            self.failure = f"rank {failure.error_index} failed: {failure}"
        finally:
            self._end_processes()
            self._receive()
            self._connection.close()

    def _ended(self) -> bool:
        if self.interrupted and self._out_of_time():
            return True
        return bool(self._processes.join(timeout=0))

    def _out_of_time(self) -> bool:
        """Asks the workers to stop, once; true when they had time enough to.

        They get none before the first progress, when nothing would be lost, nor after a second
        Ctrl-C.
        """
        if self._stop_by is None:
            self._stop_by = time.monotonic() + (self._grace_seconds if self.history else 0)
            with contextlib.suppress(OSError):
                self._connection.send("stop")
        return self._interrupts > 1 or time.monotonic() > self._stop_by

    def _receive(self) -> None:
        while (message := self._next_message()) is not None:
            if isinstance(message, WorkerStarted):
                self._started += 1
                self._show_started(self._started, self._workers)
            else:
                self.history.append(message)
                self._show(message)

    def _next_message(self) -> P | WorkerStarted | None:
        with contextlib.suppress(EOFError, OSError):  # the workers are gone
            if self._connection.poll():
                message: P | WorkerStarted = self._connection.recv()
                return message
        return None

    def _count_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self.interrupted = True

    def _end_processes(self) -> None:
        for process in self._processes.processes:
            process.terminate()
        for process in self._processes.processes:
            process.join(GRACE_SECONDS)
            process.kill()
            process.join()


def _begin(
    rank: int,
    worker: Callable[..., None],
    options: object,
    init_method: str,
    monitor: Monitor[Any],
) -> None:
    """Run a worker process."""
    monitor.started()
    worker(rank, options, init_method, monitor)


@contextlib.contextmanager
def on_interrupt(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls a function at Ctrl-C, in the main thread."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Blocks Ctrl-C here for a while, and for good in the processes started meanwhile.

    Processes could as well inherit that it is ignored, but then one that comes meanwhile would be
    lost here; this way it comes late. Where the system can't block signals, workers may complain.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else `spawn` starts it, and then unblocks Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
