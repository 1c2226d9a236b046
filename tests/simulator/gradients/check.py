"""Checking programs, one after the other or at once, on one set of workers."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar, cast

from clusters import patient_cluster
from patience import PATIENCE

from farcall import rpc
from farcall.runtime.threads.thread_stacks import current_frames
from farcall.testing.cluster import Transport, acting_as
from simulator.gradients.distributed import Host, hosting, run_distributed
from simulator.gradients.generate import draw_leaves, generate
from simulator.gradients.local import run_locally
from simulator.gradients.outcome import Outcome, differences
from simulator.gradients.program import MAX_WORKERS, Program

T = TypeVar("T")


class Hang(Exception):
    """A program did not end; the message shows what all threads were doing."""


class Bench:
    """Workers in this process, for many programs. A context manager.

    Args:
        transport: between the workers.
        options: for every worker's agent.
    """

    def __init__(self, transport: Transport = "inproc", **options: Any) -> None:
        self._cluster = patient_cluster(MAX_WORKERS, transport=transport, **options)
        self._stack = ExitStack()
        self._numbers = itertools.count()
        self._programs: dict[int, int] = {}
        self._hosts: Sequence[rpc.RRef[Host]] = ()

    def __enter__(self) -> Bench:
        self._agents = self._stack.enter_context(self._cluster)
        self._hosts = self._stack.enter_context(hosting(self._agents))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if isinstance(error, Hang):
            self._stack.pop_all()  # what hangs can't be ended
        self._stack.close()

    def run(self, program: Program, fast: Sequence[bool] = ()) -> Outcome:
        """Run a program on the workers. Thread-safe.

        Args:
            program: to run.
            fast: for each pass, whether `mode="fast"` may be used if the program wants it.

        Raises:
            Hang: it did not end.
        """
        number = next(self._numbers)
        self._programs[number] = program.seed

        def act() -> Outcome:
            with acting_as(self._agents[0]):
                return run_distributed(self._hosts, number, program, fast)

        return within(PATIENCE, act)

    def check(self, program: Program) -> list[str]:
        """Return the differences of the program's outcome from the local run's; a line for each.

        Raises:
            Hang: it did not end.
        """
        expected = run_locally(program)
        found = self.run(program, expected.fast)
        return differences(expected, found, undefined=program.has_undefined_gradients)

    def check_together(self, programs: Sequence[Program]) -> list[str]:
        """Return the same for programs with the same leaves that run at once, each in a thread.

        Raises:
            Hang: one did not end.
        """
        expected = [run_locally(program) for program in programs]
        found: list[Outcome | BaseException | None] = [None] * len(programs)

        def act(index: int) -> None:
            try:
                found[index] = self.run(programs[index], expected[index].fast)
            except BaseException as error:
                found[index] = error

        self._on_hosts(lambda host: host.share(programs[0].leaves))
        threads = [threading.Thread(target=act, args=(i,)) for i in range(len(programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hooks: list[Counter[str]] = self._on_hosts(lambda host: host.unshare())
        lines = []
        for program, one, other in zip(programs, expected, found, strict=True):
            if not isinstance(other, Outcome):
                assert other is not None
                raise other
            undefined = program.has_undefined_gradients
            for line in differences(one, other, undefined=undefined, shared_parameters=True):
                lines.append(f"program {program.seed}: {line}")
        if not any(one.error for one in expected):
            lines += _hook_differences(expected, hooks)
        return lines

    def leftovers(self, patience: float = PATIENCE) -> list[str]:
        """Return the leftovers of programs that are over; a line for each.

        Args:
            patience: seconds until it must be gone. Contexts end elsewhere a little later.
        """
        deadline = time.monotonic() + patience
        pause = threading.Event()
        while True:
            gc.collect()  # a graph with create_graph is a cycle
            kept: list[list[int]] = self._on_hosts(lambda host: host.kept())
            open_contexts = [len(cast(Sized, agent.gradients)) for agent in self._agents]
            if not any(kept) and not any(open_contexts):
                return []
            if time.monotonic() > deadline:
                break
            pause.wait(0.01)
        lines = [f"w{i} has {n} contexts" for i, n in enumerate(open_contexts) if n]
        for index, numbers in enumerate(kept):
            seeds = [self._programs[number] for number in numbers]
            lines += [f"the graph of program {seed} is kept on w{index}" for seed in seeds]
        return lines

    def _on_hosts(self, call: Callable[[Any], Any]) -> list[Any]:
        with acting_as(self._agents[0]):
            return [call(host.rpc_sync()) for host in self._hosts]


def generate_together(seed: int, count: int = 3) -> list[Program]:
    """Programs with the same leaves. Equal arguments give equal programs."""
    workers = 2 + seed % (MAX_WORKERS - 1)
    leaves = draw_leaves(seed, workers)
    return [
        generate(seed * count + index, leaves=leaves, workers=workers) for index in range(count)
    ]


def _hook_differences(expected: Sequence[Outcome], found: Sequence[Counter[str]]) -> list[str]:
    lines = []
    for worker, counted in enumerate(found):
        total: Counter[str] = Counter()
        for outcome in expected:
            if worker < len(outcome.reports):
                total += outcome.reports[worker].parameter_hooks
        if total != counted:
            lines.append(f"w{worker}: calls of hooks of parameters {counted}, expected {total}")
    return lines


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return the function's result, if it comes in time.

    Raises:
        Hang: it did not.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def act() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Hang(f"not done after {seconds:.0f} seconds\n{stacks()}")
    if errors:
        raise errors[0]
    return results[0]


def stacks() -> str:
    """Return the stacks of all threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)[-8:])}"
        for ident, frame in current_frames().items()
    )
