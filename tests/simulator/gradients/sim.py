"""Command line for random programs: many, or one again.

    python -m simulator.gradients --programs 10000 --jobs 2
    python -m simulator.gradients --seed 1234 --replay --shrink
    python -m simulator.gradients --seed 40 --replay --together

After every ten programs, three with the same leaves run at once (`--together`). Exit code 0: all
gradients, and counts of what ran, equal those of the local runs; 1: some do not, and how to replay
them is said.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import click
import torch

from simulator.gradients.check import Bench, Hang, generate_together
from simulator.gradients.generate import generate
from simulator.gradients.local import run_locally
from simulator.gradients.program import Program, describe
from simulator.gradients.shrink import shrink
from simulator.seeds import Advance, print_failures, progress_bar

CHUNK = 100  # programs a process runs between two reports, on the same workers
TOGETHER_EVERY = 10


class Failure(NamedTuple):
    """A program that failed, or three that ran at once, and the first difference.

    Attributes:
        seed: replays it.
        together: whether it is that of three programs.
        text: a description of the failure.
    """

    seed: int
    together: bool
    text: str

    @property
    def command(self) -> str:
        """Replays it."""
        options = "--together" if self.together else "--shrink"
        command = f"-m simulator.gradients --replay --seed {self.seed} {options}"
        return f"PYTHONPATH=tests {sys.executable} {command}"


class Summary(NamedTuple):
    """The result of a run of many programs."""

    programs: int = 0
    steps: int = 0
    failures: tuple[Failure, ...] = ()

    def plus(self, other: Summary) -> Summary:
        return Summary(
            self.programs + other.programs,
            self.steps + other.steps,
            self.failures + other.failures,
        )


def run_chunk(task: tuple[int, int]) -> Summary:
    """Run `count` programs from seed `first`; the task is (first, count)."""
    first, count = task
    torch.set_num_threads(1)
    logging.getLogger("farcall").setLevel(logging.CRITICAL)  # programs fail on purpose, too
    total, seed = Summary(), first
    while seed < first + count:
        with Bench(num_worker_threads=_threads(seed)) as bench:
            total, seed = _run_on(bench, total, seed, first + count)
    return total


def _threads(seed: int) -> int:
    """Return how many threads a worker has for this program: mostly one, which is enough."""
    return 1 if seed // CHUNK % 3 else 16


def _run_on(bench: Bench, total: Summary, first: int, end: int) -> tuple[Summary, int]:
    """Run programs on these workers, up to the first that hangs; where to go on."""
    for seed in range(first, end):
        summary, hangs = _run_seed(bench, seed)
        total = total.plus(summary)
        if hangs:
            return total, seed + 1
    left = tuple(Failure(first, False, line) for line in bench.leftovers())
    return total.plus(Summary(failures=left)), end


def _run_seed(bench: Bench, seed: int) -> tuple[Summary, bool]:
    """Run a program, and perhaps three; whether one hangs."""
    program = generate(seed)
    text, hangs = attempt(bench, [program])
    failures = [Failure(seed, False, text)] if text else []
    count = 1
    if seed % TOGETHER_EVERY == 0 and not hangs:
        programs = generate_together(seed)
        text, hangs = attempt(bench, programs)
        failures += [Failure(seed, True, text)] if text else []
        count += len(programs)
    return Summary(count, program.size, tuple(failures)), hangs


def attempt(bench: Bench, programs: Sequence[Program]) -> tuple[str, bool]:
    """Run programs at once; return a description of the failure, or "", and whether one hangs."""
    try:
        one = len(programs) == 1
        lines = bench.check(programs[0]) if one else bench.check_together(programs)
    except Hang as hang:
        return str(hang), True
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    return "\n".join(lines), False


def run_many(programs: int, first: int, jobs: int, advance: Advance) -> Summary:
    """Run the programs of seeds `first`, `first + 1`, ... in `jobs` processes."""
    end = first + programs
    tasks = [(start, min(CHUNK, end - start)) for start in range(first, end, CHUNK)]
    total = Summary()
    if jobs == 1:
        for task in tasks:
            total = total.plus(_announced(run_chunk(task)))
            advance(task[1])
        return total
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=20) as pool:
        for task, summary in zip(tasks, pool.imap(run_chunk, tasks), strict=True):
            total = total.plus(_announced(summary))
            advance(task[1])
    return total


def _announced(summary: Summary) -> Summary:
    """Print the failures on standard error, since a run may be long; return the summary."""
    for failure in summary.failures:
        click.echo(f"{failure.command}\n{failure.text}\n", err=True)
    return summary


def replay(seed: int, together: bool, small: bool) -> int:
    """Print one program, or three, and run it; the exit code."""
    programs = generate_together(seed) if together else [generate(seed)]
    text, hangs = _attempt_alone(programs, _threads(seed))
    if text and small and not (together or hangs):
        programs = [_smaller(programs[0], _threads(seed))]
        text, hangs = _attempt_alone(programs, _threads(seed))
    for program in programs:
        print(describe(program))
        print()
    print(text or "no difference")
    return 1 if text else 0


def _attempt_alone(programs: Sequence[Program], threads: int) -> tuple[str, bool]:
    """Run the programs on workers of their own, and look for leftovers."""
    try:
        with Bench(num_worker_threads=threads) as bench:
            text, hangs = attempt(bench, programs)
            if hangs:
                raise Hang(text)
            return text or "\n".join(bench.leftovers()), False
    except Hang as hang:
        return str(hang), True


def _smaller(program: Program, threads: int) -> Program:
    """Return a program that differs, made smaller.

    A program that hangs or leaves something behind stays as it is.
    """
    with Bench(num_worker_threads=threads) as bench:

        def fails(candidate: Program) -> bool:
            try:
                if run_locally(candidate).error:
                    return False
            except Exception:  # it makes no sense, in whatever way
                return False
            text, hangs = attempt(bench, [candidate])
            return bool(text) and not hangs

        return shrink(program, fails)


def report(summary: Summary, seconds: float) -> int:
    """Print what many programs came to; the exit code."""
    failures = sorted(summary.failures)
    print(
        f"{summary.programs} programs, {summary.steps} steps, "
        f"{len(failures)} with differences, {seconds:.1f} seconds"
    )
    return print_failures(
        [(failure.seed, failure.text.splitlines()[0], failure.command) for failure in failures]
    )


@click.command()
@click.option("--programs", default=1_000, show_default=True, help="How many to run.")
@click.option("--seed", default=0, show_default=True, help="Of the first program.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--replay", "again", is_flag=True, help="Print the program of --seed and run it.")
@click.option("--together", is_flag=True, help="With --replay: the three that run at once.")
@click.option("--shrink", "small", is_flag=True, help="With --replay: make it smaller first.")
def main(programs: int, seed: int, jobs: int, again: bool, together: bool, small: bool) -> None:
    """Run random programs with distributed autograd, and compare with runs in one place."""
    torch.set_num_threads(1)
    logging.getLogger("farcall").setLevel(logging.CRITICAL)
    if again:
        sys.exit(replay(seed, together, small))
    began = time.monotonic()
    with progress_bar(programs, "programs") as advance:
        summary = run_many(programs, seed, jobs, advance)
    sys.exit(report(summary, time.monotonic() - began))
