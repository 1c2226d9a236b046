"""farcall against torch.distributed.rpc on this machine, in turn, in one run.

    python benchmarks/run.py [--rounds N] [--cases noop,rnn_tiny,...] [--json FILE]

Each round starts a fresh pair of processes for each implementation. The table of calls gives
medians over all calls of all rounds, 99th percentiles, and the ratio of the medians
(torch / farcall). The table of training gives medians over all iterations of all rounds, and what
each implementation adds to the time of the same model in one process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.progress import track

IMPLEMENTATIONS = ("farcall", "torch")
LOCAL = "local"
CALLS = ("noop", "echo4", "rref_method", "echo_1mb", "echo_16mb", "in_flight", "references")
TRAINING = ("rnn_tiny", "rnn_real")
PEER = Path(__file__).with_name("peer.py")

Times = dict[str, dict[str, list[float]]]  # implementation -> case -> seconds


class Job(NamedTuple):
    """One start of `peer.py`."""

    implementation: str
    cases: str


def jobs(cases: list[str]) -> list[Job]:
    """One round. Calls share a pair of processes; each training case has its own."""
    calls = ",".join(case for case in cases if case in CALLS)
    round_ = [Job(name, calls) for name in IMPLEMENTATIONS if calls]
    for case in cases:
        if case in TRAINING:
            round_ += [Job(name, case) for name in (LOCAL, *IMPLEMENTATIONS)]
    return round_


def measure(job: Job) -> dict[str, list[float]]:
    """Seconds per call, by case, from a fresh pair of processes."""
    command = [sys.executable, "-W", "ignore", str(PEER), *job]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stderr}")
    results: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def summary(times: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds."""
    ordered = sorted(times)
    return (
        statistics.median(ordered) * 1e6,
        ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6,
    )


def overheads(times: Times, case: str) -> dict[str, float]:
    """Medians of a training case in milliseconds, and what each implementation adds to local."""
    local, ours, theirs = (
        statistics.median(times[name][case]) * 1e3 for name in (LOCAL, *IMPLEMENTATIONS)
    )
    return {
        "local_ms": local,
        "torch_ms": theirs,
        "farcall_ms": ours,
        "torch_overhead_ms": theirs - local,
        "torch_overhead_percent": (theirs / local - 1) * 100,
        "farcall_overhead_ms": ours - local,
        "farcall_overhead_percent": (ours / local - 1) * 100,
        "farcall_overhead_per_torch_overhead": (ours - local) / (theirs - local),
    }


def print_calls(times: Times, cases: list[str]) -> None:
    print("| case | farcall median us | p99 | torch median us | p99 | torch / farcall |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        ours, ours99 = summary(times["farcall"][case])
        theirs, theirs99 = summary(times["torch"][case])
        print(
            f"| {case} | {ours:.1f} | {ours99:.1f} | {theirs:.1f} | {theirs99:.1f} "
            f"| {theirs / ours:.2f} |"
        )


def print_training(training: dict[str, dict[str, float]]) -> None:
    print("| case | local ms | torch ms | farcall ms | torch adds | farcall adds | of torch's |")
    print("|---|---|---|---|---|---|---|")
    for case, row in training.items():
        print(
            f"| {case} | {row['local_ms']:.2f} | {row['torch_ms']:.2f} | {row['farcall_ms']:.2f} "
            f"| {row['torch_overhead_ms']:.2f} ms, {row['torch_overhead_percent']:.0f} % "
            f"| {row['farcall_overhead_ms']:.2f} ms, {row['farcall_overhead_percent']:.0f} % "
            f"| {row['farcall_overhead_per_torch_overhead']:.2f} |"
        )


def chosen(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    cases = value.split(",")
    for case in cases:
        if case not in (*CALLS, *TRAINING):
            raise click.BadParameter(f"{case!r} is none of {', '.join((*CALLS, *TRAINING))}")
    return cases


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Fresh process pairs for each.")
@click.option(
    "--cases",
    default=",".join((*CALLS, *TRAINING)),
    show_default=True,
    callback=chosen,
    help="Which, with commas.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything here.")
def main(rounds: int, cases: list[str], json_path: Path | None) -> None:
    """Compare farcall with torch.distributed.rpc."""
    times: Times = {name: {} for name in (*IMPLEMENTATIONS, LOCAL)}
    for job in track(jobs(cases) * rounds, "Measuring", console=Console(stderr=True)):
        for case, seconds in measure(job).items():
            times[job.implementation].setdefault(case, []).extend(seconds)
    calls = [case for case in cases if case in CALLS]
    training = {case: overheads(times, case) for case in cases if case in TRAINING}
    if calls:
        print_calls(times, calls)
    if calls and training:
        print()
    if training:
        print_training(training)
    if json_path is not None:
        json_path.write_text(json.dumps({"seconds": times, "training": training}))


if __name__ == "__main__":
    main()
