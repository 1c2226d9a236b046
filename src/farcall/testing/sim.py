"""Command line of the simulator: many schedules, or one again.

    python -m farcall.testing.sim --schedules 100000 --jobs 2
    python -m farcall.testing.sim --seed 1234 --replay
    python -m farcall.testing.sim --schedules 5000 --plant does-not-pin

Exit code 0: every schedule kept the invariants; 1: some did not, and how to replay them is said.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import click
from rich.console import Console
from rich.progress import Progress

from farcall.testing.oracle import Violation
from farcall.testing.planted import PlantedBug
from farcall.testing.simulation import simulate

CHUNK = 250  # schedules a process runs between two reports
SHOWN = 10  # failing seeds that are printed


class Summary(NamedTuple):
    """What a run of many schedules came to; `failures` are (seed, first violation)."""

    schedules: int = 0
    events: int = 0
    failures: tuple[tuple[int, Violation], ...] = ()

    def plus(self, other: Summary) -> Summary:
        return Summary(
            self.schedules + other.schedules,
            self.events + other.events,
            self.failures + other.failures,
        )


class Advance(Protocol):
    """Called with the number of schedules that are done."""

    def __call__(self, schedules: int) -> None: ...


def run_chunk(task: tuple[int, int, PlantedBug | None]) -> Summary:
    """Run `count` schedules from seed `first`; the task is (first, count, bug)."""
    first, count, bug = task
    events, failures = 0, []
    for seed in range(first, first + count):
        result = simulate(seed, bug=bug)
        events += result.events
        if result.violations:
            failures.append((seed, result.violations[0]))
    return Summary(count, events, tuple(failures))


def run_many(
    schedules: int, first: int, jobs: int, bug: PlantedBug | None, advance: Advance
) -> Summary:
    """Run schedules `first`, `first + 1`, ... in `jobs` processes."""
    end = first + schedules
    tasks = [(start, min(CHUNK, end - start), bug) for start in range(first, end, CHUNK)]
    total = Summary()
    if jobs == 1:
        for summary in map(run_chunk, tasks):
            total = total.plus(summary)
            advance(summary.schedules)
        return total
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for summary in pool.imap_unordered(run_chunk, tasks):
            total = total.plus(summary)
            advance(summary.schedules)
    return total


@contextmanager
def progress_bar(schedules: int) -> Iterator[Advance]:
    """A bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda schedules: None
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("schedules", total=schedules)
        yield lambda schedules: progress.advance(bar, schedules)


def replay(seed: int, bug: PlantedBug | None) -> int:
    """Print one schedule, event by event; the exit code."""
    result = simulate(seed, bug=bug)
    for event in result.log:
        print(event)
    print(result.faults)
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    print(f"seed {seed}: {result.events} events, {len(result.violations)} violations")
    return 1 if result.violations else 0


def report(summary: Summary, seconds: float, bug: PlantedBug | None) -> int:
    """Print what many schedules came to; the exit code."""
    failures = sorted(summary.failures)
    print(
        f"{summary.schedules} schedules, {summary.events} events, "
        f"{len(failures)} with violations, {seconds:.1f} seconds"
    )
    planted = f" --plant {bug.value}" if bug else ""
    for seed, violation in failures[:SHOWN]:
        print(f"seed {seed}: {violation}")
        print(f"    {sys.executable} -m farcall.testing.sim --replay --seed {seed}{planted}")
    if len(failures) > SHOWN:
        print(f"... and {len(failures) - SHOWN} more")
    return 1 if failures else 0


@click.command()
@click.option("--schedules", default=10_000, show_default=True, help="How many to run.")
@click.option("--seed", default=0, show_default=True, help="Of the first schedule.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--plant", type=click.Choice([bug.value for bug in PlantedBug]), help="A mistake.")
@click.option("--replay", "again", is_flag=True, help="Print the events of schedule --seed.")
def main(schedules: int, seed: int, jobs: int, plant: str | None, again: bool) -> None:
    """Simulate the call and reference protocols under faults, and check their invariants."""
    bug = PlantedBug(plant) if plant else None
    if again:
        sys.exit(replay(seed, bug))
    began = time.monotonic()
    with progress_bar(schedules) as advance:
        summary = run_many(schedules, seed, jobs, bug, advance)
    sys.exit(report(summary, time.monotonic() - began, bug))


if __name__ == "__main__":
    main()
