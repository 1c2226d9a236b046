"""Command line of the simulator: many schedules, or one again.

    python -m simulator.sim --schedules 100000 --jobs 2
    python -m simulator.sim --seed 1234 --replay
    python -m simulator.sim --schedules 5000 --plant does-not-pin
    python -m simulator.sim --protocol backward --schedules 100000
    python -m simulator.sim --protocol connecting --schedules 100000
    python -m simulator.sim --protocol termination --schedules 100000
    python -m simulator.sim --protocol directory --schedules 100000
    python -m simulator.sim --protocol supervision --schedules 100000
    python -m simulator.sim --protocol agents --schedules 1000
    python -m simulator.sim --schedules 5000 --coverage

Exit code 0: every schedule kept the invariants; 1: some did not, and how to replay them is said.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from types import ModuleType
from typing import NamedTuple

import click

from farcall.protocol import (
    calls,
    connecting,
    contexts,
    credit,
    directory,
    instructions,
    knowledge,
    leading,
    lookup,
    passes,
    ref_entries,
    ref_tables,
    refs,
    standing,
    succession,
    termination,
    worker,
)
from simulator.agents import AgentBug, simulate_agents
from simulator.backward import BackwardBug, simulate_backward
from simulator.connecting import ConnectingBug, simulate_connecting
from simulator.coverage import Reached
from simulator.directory import DirectoryBug, simulate_directory
from simulator.planted import PlantedBug
from simulator.schedule import Result, Script, Violation
from simulator.seeds import Advance, print_failures, progress_bar
from simulator.shrinking import shrink
from simulator.simulation import simulate
from simulator.supervision import SupervisionBug, simulate_supervision
from simulator.termination import TerminationBug, simulate_termination

CHUNK = 250
CHUNK_OF_AGENTS = 10
# A killed worker's threads stay until the process ends that has simulated it.
CHUNKS_OF_A_PROCESS = 20


class Protocol(NamedTuple):
    """A protocol that can be simulated.

    Attributes:
        simulate: runs a schedule of it; takes a seed, and by name `bug` and `script`.
        bugs: the mistakes that can be planted.
        machines: the modules of which each line is to be reached.
        chunk: how many schedules a process runs between two reports.
    """

    simulate: Callable[..., Result]
    bugs: type[Enum]
    machines: Sequence[ModuleType]
    chunk: int = CHUNK


CALLS = (worker, calls, refs, ref_tables, ref_entries, instructions)
SUPERVISION = (knowledge, leading, standing, succession)
PROTOCOLS = {
    "calls": Protocol(simulate, PlantedBug, CALLS),
    "backward": Protocol(simulate_backward, BackwardBug, (passes, contexts, credit)),
    "connecting": Protocol(simulate_connecting, ConnectingBug, (connecting,)),
    "termination": Protocol(simulate_termination, TerminationBug, (termination,)),
    "directory": Protocol(simulate_directory, DirectoryBug, (directory, lookup)),
    "supervision": Protocol(simulate_supervision, SupervisionBug, SUPERVISION),
    "agents": Protocol(simulate_agents, AgentBug, (), CHUNK_OF_AGENTS),
}
# Methods of the machines that agents call, and no simulated worker. No simulated worker has a
# second life.
QUERIES = {
    "Connecting.is_idle",
    "Contexts._begin_life",
    "Contexts.close",
    "Contexts.is_dead",
    "DirectoryMachine.present",
    "Incoming.__len__",
    "Incoming.records",
    "Outgoing.find",
    "Outgoing.records",
    "RefTables.holders",
    "RefTables.knows",
    "RefTables.owner_of",
    "RefTables.state",
    "Refs.take",
    "Surroundings.me",
    "RefTables.void_cause",
}


class Summary(NamedTuple):
    """The result of a run of many schedules; `failures` are (seed, first violation)."""

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
    """The choice of a simulation.

    Attributes:
        name: of the protocol.
        bug: a mistake to plant in it.
    """

    name: str = "calls"
    bug: str | None = None

    @property
    def protocol(self) -> Protocol:
        return PROTOCOLS[self.name]

    def simulate(self, seed: int, script: Script | None = None) -> Result:
        """Simulate one schedule."""
        protocol = self.protocol
        bug = protocol.bugs(self.bug) if self.bug else None
        return protocol.simulate(seed, bug=bug, script=script)

    @property
    def options(self) -> str:
        """As on the command line."""
        name = "" if self.name == "calls" else f" --protocol {self.name}"
        return name + (f" --plant {self.bug}" if self.bug else "")


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
    chunk = chosen.protocol.chunk
    tasks = [(start, min(chunk, end - start), chosen) for start in range(first, end, chunk)]
    total = Summary()
    if jobs == 1:
        for summary in map(run_chunk, tasks):
            total = total.plus(summary)
            advance(summary.schedules)
        return total
    with multiprocessing.get_context("spawn").Pool(
        jobs, maxtasksperchild=None if chunk == CHUNK else CHUNKS_OF_A_PROCESS
    ) as pool:
        for summary in pool.imap_unordered(run_chunk, tasks):
            total = total.plus(summary)
            advance(summary.schedules)
    return total


def replay(seed: int, chosen: Chosen) -> int:
    """Print one schedule, or if it fails the shrunk one, event by event; return the exit code."""
    result = shrink(partial(chosen.simulate, seed))
    for event in result.log:
        print(event)
    print(result.faults)
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    whole = f" of {chosen.simulate(seed).events}" if result.violations else ""
    print(f"seed {seed}: {result.events}{whole} events, {len(result.violations)} violations")
    return 1 if result.violations else 0


def cover(schedules: int, first: int, chosen: Chosen) -> int:
    """Print which lines of the machines these schedules do not reach; the exit code.

    The first schedules that have reached every line are enough.
    """
    with Reached(chosen.protocol.machines, QUERIES) as reached:
        for seed in range(first, first + schedules):
            chosen.simulate(seed)
            if not reached.missed():
                break
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
    again = f"PYTHONPATH=tests {sys.executable} -m simulator.sim --replay --seed"
    return print_failures(
        [(seed, str(wrong), f"{again} {seed}{chosen.options}") for seed, wrong in failures]
    )


@click.command()
@click.option("--schedules", default=10_000, show_default=True, help="How many to run.")
@click.option("--seed", default=0, show_default=True, help="Of the first schedule.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--protocol", type=click.Choice(list(PROTOCOLS)), default="calls", show_default=True)
@click.option("--plant", help="A mistake, to see it found.")
@click.option("--coverage", is_flag=True, help="Print which lines of the machines are not reached.")
@click.option(
    "--replay",
    "again",
    is_flag=True,
    help="Print the events of schedule --seed, shrunk if it fails.",
)
def main(
    schedules: int,
    seed: int,
    jobs: int,
    protocol: str,
    plant: str | None,
    coverage: bool,
    again: bool,
) -> None:
    """Simulate protocols under faults, and check their invariants.

    "calls" is the protocol of calls and references, "backward" that of distributed backward passes,
    "connecting" the rules by which a worker is reached, or declared dead, "termination" those by
    which a group leaves together, "directory" those by which workers are known, part and meet
    again, "supervision" those by which objects have one supervisor. "agents" are whole workers, on
    a simulated operating system.
    """
    bugs = [bug.value for bug in PROTOCOLS[protocol].bugs]
    if plant and plant not in bugs:
        raise click.BadParameter(f"{plant!r} is none of {', '.join(bugs)}")
    chosen = Chosen(protocol, plant)
    if again:
        sys.exit(replay(seed, chosen))
    if coverage and not PROTOCOLS[protocol].machines:
        raise click.BadParameter(f"--coverage is of machines, and {protocol!r} has more than those")
    if coverage:
        sys.exit(cover(schedules, seed, chosen))
    began = time.monotonic()
    with progress_bar(schedules, "schedules") as advance:
        summary = run_many(schedules, seed, jobs, chosen, advance)
    sys.exit(report(summary, time.monotonic() - began, chosen))


if __name__ == "__main__":
    main()
