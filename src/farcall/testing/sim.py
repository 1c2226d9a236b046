"""Command line of the simulator: many schedules, or one again.

    python -m farcall.testing.sim --schedules 100000 --jobs 2
    python -m farcall.testing.sim --seed 1234 --replay
    python -m farcall.testing.sim --schedules 5000 --plant does-not-pin
    python -m farcall.testing.sim --protocol backward --schedules 100000
    python -m farcall.testing.sim --protocol connecting --schedules 100000
    python -m farcall.testing.sim --protocol termination --schedules 100000
    python -m farcall.testing.sim --protocol directory --schedules 100000
    python -m farcall.testing.sim --schedules 5000 --coverage

Exit code 0: every schedule kept the invariants; 1: some did not, and how to replay them is said.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import NamedTuple

import click

from farcall.protocol import (
    calls,
    connecting,
    contexts,
    directory,
    instructions,
    lookup,
    passes,
    ref_entries,
    ref_tables,
    refs,
    shares,
    termination,
    worker,
)
from farcall.testing.backward import BackwardBug, simulate_backward
from farcall.testing.connecting import ConnectingBug, simulate_connecting
from farcall.testing.coverage import Reached
from farcall.testing.directory import DirectoryBug, simulate_directory
from farcall.testing.network import Faults
from farcall.testing.oracle import Violation
from farcall.testing.planted import PlantedBug
from farcall.testing.seeds import SHOWN, Advance, print_failures, progress_bar
from farcall.testing.shrinking import but_for, shrink
from farcall.testing.simulation import Result, simulate
from farcall.testing.termination import TerminationBug, simulate_termination

CHUNK = 250  # schedules a process runs between two reports
BUGS = {
    "calls": [bug.value for bug in PlantedBug],
    "backward": [bug.value for bug in BackwardBug],
    "connecting": [bug.value for bug in ConnectingBug],
    "termination": [bug.value for bug in TerminationBug],
    "directory": [bug.value for bug in DirectoryBug],
}

FAULTS = {field.name for field in fields(Faults)}
MACHINES: dict[str, Sequence[ModuleType]] = {
    "calls": (worker, calls, refs, ref_tables, ref_entries, instructions),
    "backward": (passes, contexts, shares),
    "connecting": (connecting,),
    "termination": (termination,),
    "directory": (directory, lookup),
}
# What agents ask the machines, and no simulated worker does.
QUERIES = {
    "Connecting.is_idle",
    "Contexts.close",
    "Contexts.is_dead",
    "Incoming.__len__",
    "Outgoing.find",
    "Outgoing.records",
    "RefTables.holders",
    "RefTables.knows",
    "RefTables.state",
    "Refs.take",
    "RefTables.void_cause",
}


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


class Chosen(NamedTuple):
    """What to simulate.

    Attributes:
        protocol: which.
        bug: a mistake to plant in it.
        steps: the length of the first part of each schedule; drawn from the seed when None.
        without: names of faults that don't happen.
    """

    protocol: str = "calls"
    bug: str | None = None
    steps: int | None = None
    without: tuple[str, ...] = ()

    def simulate(self, seed: int) -> Result:
        """One schedule."""
        if self.protocol == "backward":
            return simulate_backward(seed, bug=BackwardBug(self.bug) if self.bug else None)
        if self.protocol == "connecting":
            return simulate_connecting(seed, bug=ConnectingBug(self.bug) if self.bug else None)
        if self.protocol == "termination":
            return simulate_termination(seed, bug=TerminationBug(self.bug) if self.bug else None)
        if self.protocol == "directory":
            return simulate_directory(seed, bug=DirectoryBug(self.bug) if self.bug else None)
        faults = None
        if self.without:
            faults = but_for(self._run(seed, None, 0).faults, self.without)
        return self._run(seed, faults, self.steps)

    def _run(self, seed: int, faults: Faults | None, steps: int | None) -> Result:
        return simulate(seed, faults, steps=steps, bug=PlantedBug(self.bug) if self.bug else None)

    def shrunk(self, seed: int) -> Chosen:
        """What is left of a failing schedule; only those of calls are made smaller."""
        small = shrink(partial(self._run, seed)) if self.protocol == "calls" else None
        return self if small is None else self._replace(steps=small.steps, without=small.without)

    @property
    def options(self) -> str:
        """As on the command line."""
        protocol = "" if self.protocol == "calls" else f" --protocol {self.protocol}"
        steps = "" if self.steps is None else f" --steps {self.steps}"
        faults = "".join(f" --without {name}" for name in self.without)
        return protocol + (f" --plant {self.bug}" if self.bug else "") + steps + faults


def run_chunk(task: tuple[int, int, Chosen]) -> Summary:
    """Run `count` schedules from seed `first`; the task is (first, count, chosen)."""
    first, count, chosen = task
    events, failures = 0, []
    for seed in range(first, first + count):
        result = chosen.simulate(seed)
        events += result.events
        if result.violations:
            failures.append((seed, result.violations[0]))
    return Summary(count, events, tuple(failures))


def run_many(schedules: int, first: int, jobs: int, chosen: Chosen, advance: Advance) -> Summary:
    """Run schedules `first`, `first + 1`, ... in `jobs` processes."""
    end = first + schedules
    tasks = [(start, min(CHUNK, end - start), chosen) for start in range(first, end, CHUNK)]
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


def replay(seed: int, chosen: Chosen) -> int:
    """Print one schedule, event by event; the exit code."""
    result = chosen.simulate(seed)
    for event in result.log:
        print(event)
    print(result.faults)
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    print(f"seed {seed}: {result.events} events, {len(result.violations)} violations")
    return 1 if result.violations else 0


def cover(schedules: int, first: int, chosen: Chosen) -> int:
    """Print which lines of the machines these schedules did not reach; the exit code."""
    with Reached(MACHINES[chosen.protocol], QUERIES) as reached:
        for seed in range(first, first + schedules):
            chosen.simulate(seed)
    missed = reached.missed()
    for line in missed:
        print(f"MISSED {line}")
    print(f"{len(reached) - len(missed)} of {len(reached)} lines of the machines were reached")
    return 1 if missed else 0


def report(summary: Summary, seconds: float, chosen: Chosen) -> int:
    """Print what many schedules came to; the exit code."""
    failures = sorted(summary.failures)
    print(
        f"{summary.schedules} schedules, {summary.events} events, "
        f"{len(failures)} with violations, {seconds:.1f} seconds"
    )
    return print_failures(
        [
            (seed, str(violation), _command(seed, chosen.shrunk(seed) if n < SHOWN else chosen))
            for n, (seed, violation) in enumerate(failures)
        ]
    )


def _command(seed: int, chosen: Chosen) -> str:
    """Replays it."""
    return f"{sys.executable} -m farcall.testing.sim --replay --seed {seed}{chosen.options}"


@click.command()
@click.option("--schedules", default=10_000, show_default=True, help="How many to run.")
@click.option("--seed", default=0, show_default=True, help="Of the first schedule.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--protocol", type=click.Choice(list(BUGS)), default="calls", show_default=True)
@click.option("--plant", help="A mistake, to see it found.")
@click.option("--coverage", is_flag=True, help="Print which lines of the machines are not reached.")
@click.option("--steps", type=int, help="The length of each schedule's first part.")
@click.option("--without", multiple=True, help="A fault that does not happen.")
@click.option("--replay", "again", is_flag=True, help="Print the events of schedule --seed.")
def main(
    schedules: int,
    seed: int,
    jobs: int,
    protocol: str,
    plant: str | None,
    coverage: bool,
    steps: int | None,
    without: tuple[str, ...],
    again: bool,
) -> None:
    """Simulate protocols under faults, and check their invariants.

    "calls" is the protocol of calls and references, "backward" that of distributed backward passes,
    "connecting" the rules by which a worker is reached, or declared dead, "termination" those by
    which a group leaves together, "directory" those by which workers are known, part and meet
    again.
    """
    if plant and plant not in BUGS[protocol]:
        raise click.BadParameter(f"{plant!r} is none of {', '.join(BUGS[protocol])}")
    if (steps is not None or without) and protocol != "calls":
        raise click.BadParameter("--steps and --without are for the protocol of calls")
    if unknown := set(without) - FAULTS:
        raise click.BadParameter(f"{', '.join(unknown)} is none of {', '.join(sorted(FAULTS))}")
    chosen = Chosen(protocol, plant, steps, without)
    if again:
        sys.exit(replay(seed, chosen))
    if coverage:
        sys.exit(cover(schedules, seed, chosen))
    began = time.monotonic()
    with progress_bar(schedules, "schedules") as advance:
        summary = run_many(schedules, seed, jobs, chosen, advance)
    sys.exit(report(summary, time.monotonic() - began, chosen))


if __name__ == "__main__":
    main()
