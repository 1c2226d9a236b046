"""Runs a demo in a group whose workers are killed now and then, and come back.

What `launch.py` does for a group of fixed size, this does for one that comes and goes. The process
that draws the display trains as well: it is a member of the group, and the only one that stays.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import queue
import random
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self, TypeVar

import torch

from farcall import rpc
from farcall.demos.display import Display
from farcall.demos.elastic_processes import ElasticProcesses
from farcall.demos.launch import Training, on_interrupt

P = TypeVar("P")


@dataclass(frozen=True)
class Unrest:
    """The deaths that a run has to endure.

    Attributes:
        every: seconds from one death to the next.
        deaths: how many there have to be before the run may end as solved.
        seed: decides whom they hit.
        work: how much has to be done between two of them, after all are back: however slow the
            machine is, the run gets on.
    """

    every: float
    deaths: int
    seed: int
    work: int


def join(name: str, role: str, init_method: str) -> None:
    """Makes this process a worker of a group that others join and leave at will.

    Its calls have no limit: where workers are started again, a busy machine takes its time.
    """
    logging.getLogger("farcall").setLevel(logging.ERROR)  # that a worker is lost is no news here
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=init_method, role=role, rpc_timeout=0)
    rpc.init_rpc(name, rpc_backend_options=options)


def serve(roles: Mapping[str, str], init_method: str, name: str) -> None:
    """Answer calls, in a process that may be killed, until the demo's own process ends."""
    join(name, roles[name], init_method)
    demo = multiprocessing.parent_process()
    assert demo is not None
    demo.join()
    rpc.shutdown(graceful=False)


class Chaos:
    """Kills workers of this one's group, and tells who comes and goes. For a `with` block.

    Args:
        unrest: how often, and how many.
        names: of all workers that are to be there.
        victims: says of each death, numbered from 1, which roles lose a worker.
        display: where it is told.
    """

    def __init__(
        self,
        unrest: Unrest,
        names: Sequence[str],
        victims: Callable[[int], Sequence[str]],
        display: Display[P],
    ) -> None:
        self.deaths: Counter[str] = Counter()  # by role
        self._unrest = unrest
        self._names = frozenset(names)
        self._victims = victims
        self._display = display
        self._random = random.Random(unrest.seed)
        self._kills = 0
        self._known: set[str] = set()
        self._present: dict[str, rpc.Member] = {}
        self._events: queue.SimpleQueue[rpc.MemberEvent | int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="demo chaos", daemon=True)

    @property
    def has_killed_enough(self) -> bool:
        """Return whether there were as many deaths as there have to be."""
        return self._kills >= self._unrest.deaths

    @property
    def is_over(self) -> bool:
        """Return whether there were as many deaths as there have to be, and all are back."""
        return self.has_killed_enough and self._all_are_here()

    def tell(self, line: str) -> None:
        """Shows a line that stays."""
        self._display.tell(line)

    def _all_are_here(self) -> bool:
        return self._present.keys() == self._names

    def __enter__(self) -> Self:
        self._joins = rpc.on_join(self._events.put, present=True)
        self._leaves = rpc.on_leave(self._events.put)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._joins()
        self._leaves()
        self._events.put(None)
        self._thread.join()

    def note_work(self, work: int) -> None:
        """Hears how much has been done. With the first call the time until a death begins."""
        self._events.put(work)

    def _run(self) -> None:
        due: float | None = None
        work = enough = 0
        while True:
            seconds = None
            if due is not None and work >= enough and self._all_are_here():
                seconds = max(0.0, due - time.monotonic())
            try:
                event = self._events.get(timeout=seconds)
            except queue.Empty:
                self._kill_some()
                due = time.monotonic() + self._unrest.every
                enough = work + self._unrest.work
                continue
            match event:
                case None:
                    return
                case int():
                    due = due or time.monotonic() + self._unrest.every
                    work = event
                case _:
                    self._note(event)

    def _kill_some(self) -> None:
        for role in self._victims(self._kills + 1):
            of_role = [name for name, worker in self._present.items() if worker.role == role]
            victim = self._present.pop(self._random.choice(sorted(of_role)))
            with contextlib.suppress(ProcessLookupError):  # it has died by itself
                os.kill(victim.pid, signal.SIGKILL)
        self._kills += 1

    def _note(self, event: rpc.MemberEvent) -> None:
        worker = event.worker
        if event.kind != "joined":
            self._present.pop(worker.name, None)
            self.deaths[worker.role] += 1
            self.tell(f"{worker.name} was killed")
            return
        self._present[worker.name] = worker
        if worker.name in self._known:
            self.tell(f"{worker.name} is back")
        else:
            self._known.add(worker.name)
            self._display.show_started(len(self._known), len(self._names))


class ElasticRun(Training[P]):
    """A training in this process, in a group whose other workers are killed.

    Attributes:
        deaths: how many workers of each role have died.
        has_endured: whether there were as many deaths as there had to be.

    Args:
        display: shows how it goes.
        unrest: what the group has to endure.
    """

    def __init__(self, display: Display[P], unrest: Unrest) -> None:
        super().__init__()
        self.deaths: Counter[str] = Counter()
        self.has_endured = False
        self._display = display
        self._unrest = unrest

    def launch(
        self,
        train: Callable[[Chaos], Iterator[P]],
        me: str,
        roles: Mapping[str, str],
        victims: Callable[[int], Sequence[str]],
        work_of: Callable[[P], int],
        modules: Sequence[str],
    ) -> None:
        """Trains to the end, or to Ctrl-C, while workers are killed. Leaves no process behind.

        Call it once, in the main thread: signals are handled there.

        Args:
            train: trains, and yields its progress.
            me: name of this worker, and its role.
            roles: name and role of each other worker.
            victims: see `Chaos`.
            work_of: says how much was done, in the unit of `Unrest.work`.
            modules: what the other workers import.
        """
        folder = tempfile.TemporaryDirectory(prefix="farcall-demo-", ignore_cleanup_errors=True)
        with folder as path, on_interrupt(self._interrupt):
            init_method = Path(path, "rendezvous").as_uri()
            run = functools.partial(serve, roles, init_method)
            try:
                join(me, me, init_method)
                with (
                    ElasticProcesses(run, list(roles), [__name__, *modules], self._fail),
                    Chaos(self._unrest, list(roles), victims, self._display) as chaos,
                ):
                    self.deaths = chaos.deaths
                    rpc.wait_for(*roles)
                    for progress in train(chaos):
                        if self.interrupted:  # a destructor may have dropped the exception
                            raise KeyboardInterrupt
                        chaos.note_work(work_of(progress))
                        self.history.append(progress)
                        self._display.show(progress)
                    self.has_endured = chaos.has_killed_enough
            except KeyboardInterrupt:
                pass
            except Exception:
                self.failure = self.failure or traceback.format_exc()
            finally:
                with contextlib.suppress(rpc.NotInitialized):
                    rpc.shutdown(graceful=False)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self.interrupted:  # the rest takes no time that is worth another one
            self.interrupted = True
            raise KeyboardInterrupt

    def _fail(self, reason: str) -> None:
        self.failure = reason
        rpc.shutdown(graceful=False)  # so ends what the training waits for
