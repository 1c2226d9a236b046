"""farcall against torch.distributed.rpc on this machine, in turn, in one run.

    python benchmarks/run.py [--rounds N] [--cases noop,rnn_tiny,...] [--blocks N] [--json FILE]

Each round starts fresh processes for each implementation, which then run in turn, in short blocks
(`turns.py`). The table of calls gives medians over all calls of all rounds, 99th percentiles, and
the ratio of the medians (torch / farcall). The table of training gives medians over all iterations
of all rounds, what each implementation adds to the time of the same model in one process, and how
much farcall's share of what torch adds differs from block to block.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from turns import Blocks, PeerFailed, Plan, measure

IMPLEMENTATIONS = ("farcall", "torch")
LOCAL = "local"
CALLS = {
    "noop": Plan(counted=200, dropped=20, blocks=10),
    "echo4": Plan(counted=200, dropped=20, blocks=10),
    "rref_method": Plan(counted=100, dropped=10, blocks=10),
    "echo_1mb": Plan(counted=20, dropped=2, blocks=5),
    "echo_16mb": Plan(counted=4, dropped=1, blocks=5),
    "in_flight": Plan(counted=1, dropped=0, blocks=3),
    "references": Plan(counted=1, dropped=0, blocks=3),
}
TRAINING = {
    "rnn_tiny": Plan(counted=40, dropped=4, blocks=20),
    "rnn_real": Plan(counted=2, dropped=1, blocks=6),
}
PLANS = {**CALLS, **TRAINING}

Times = dict[str, dict[str, Blocks]]  # by implementation and case
Group = tuple[tuple[str, ...], dict[str, Plan]]  # implementations, and what they run


def groups(plans: dict[str, Plan]) -> list[Group]:
    """One round. Calls share the processes; each training case has its own."""
    calls = {case: plan for case, plan in plans.items() if case in CALLS}
    found: list[Group] = [(IMPLEMENTATIONS, calls)] if calls else []
    for case, plan in plans.items():
        if case in TRAINING:
            found.append(((LOCAL, *IMPLEMENTATIONS), {case: plan}))
    return found


def measure_rounds(round_: list[Group], rounds: int, advance: Callable[[], None]) -> Times:
    times: Times = {name: {} for name in (*IMPLEMENTATIONS, LOCAL)}
    for implementations, plans in round_ * rounds:
        for name, cases in measure(implementations, plans, advance).items():
            for case, blocks in cases.items():
                times[name].setdefault(case, []).extend(blocks)
    return times


def flat(blocks: Blocks) -> list[float]:
    return list(itertools.chain.from_iterable(blocks))


def summary(times: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds."""
    ordered = sorted(times)
    return (
        statistics.median(ordered) * 1e6,
        ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6,
    )


def share(local: float, ours: float, theirs: float) -> float:
    """What farcall adds to `local`, as a share of what torch adds; infinite if that is nothing."""
    return (ours - local) / (theirs - local) if theirs > local else math.inf


def shares(times: Times, case: str) -> list[float]:
    """`share` of the medians of each three blocks that ran next to each other, in order of size."""
    each = ([statistics.median(b) for b in times[name][case]] for name in (LOCAL, *IMPLEMENTATIONS))
    return sorted(itertools.starmap(share, zip(*each, strict=True)))


def overheads(times: Times, case: str) -> dict[str, float]:
    """Medians of a training case in milliseconds, and what each implementation adds to local."""
    local, ours, theirs = (
        statistics.median(flat(times[name][case])) * 1e3 for name in (LOCAL, *IMPLEMENTATIONS)
    )
    ordered = shares(times, case)
    return {
        "local_ms": local,
        "torch_ms": theirs,
        "farcall_ms": ours,
        "torch_overhead_ms": theirs - local,
        "torch_overhead_percent": (theirs / local - 1) * 100,
        "farcall_overhead_ms": ours - local,
        "farcall_overhead_percent": (ours / local - 1) * 100,
        "farcall_overhead_per_torch_overhead": share(local, ours, theirs),
        "of_blocks_percentile_25": ordered[len(ordered) // 4],
        "of_blocks_median": statistics.median(ordered),
        "of_blocks_percentile_75": ordered[len(ordered) * 3 // 4],
    }


def print_calls(times: Times, cases: list[str]) -> None:
    print("| case | farcall median us | p99 | torch median us | p99 | torch / farcall |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        ours, ours99 = summary(flat(times["farcall"][case]))
        theirs, theirs99 = summary(flat(times["torch"][case]))
        print(
            f"| {case} | {ours:.1f} | {ours99:.1f} | {theirs:.1f} | {theirs99:.1f} "
            f"| {theirs / ours:.2f} |"
        )


def print_training(training: dict[str, dict[str, float]]) -> None:
    print(
        "| case | local ms | torch ms | farcall ms | torch adds | farcall adds "
        "| of torch's | in blocks: 25 %, median, 75 % |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case, row in training.items():
        print(
            f"| {case} | {row['local_ms']:.2f} | {row['torch_ms']:.2f} | {row['farcall_ms']:.2f} "
            f"| {row['torch_overhead_ms']:.2f} ms, {row['torch_overhead_percent']:.0f} % "
            f"| {row['farcall_overhead_ms']:.2f} ms, {row['farcall_overhead_percent']:.0f} % "
            f"| {row['farcall_overhead_per_torch_overhead']:.2f} "
            f"| {row['of_blocks_percentile_25']:.2f}, {row['of_blocks_median']:.2f}, "
            f"{row['of_blocks_percentile_75']:.2f} |"
        )


def chosen(_context: click.Context, _parameter: click.Parameter, value: str) -> dict[str, Plan]:
    cases = value.split(",")
    for case in cases:
        if case not in PLANS:
            raise click.BadParameter(f"{case!r} is none of {', '.join(PLANS)}")
    return {case: PLANS[case] for case in cases}


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Fresh processes for each.",
)
@click.option(
    "--cases",
    "plans",
    default=",".join(PLANS),
    show_default=True,
    callback=chosen,
    help="Which, with commas.",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    help="Blocks of each implementation in a round, instead of what the case has.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything here.")
def main(rounds: int, plans: dict[str, Plan], blocks: int | None, json_path: Path | None) -> None:
    """Compare farcall with torch.distributed.rpc."""
    if blocks is not None:
        plans = {case: plan._replace(blocks=blocks) for case, plan in plans.items()}
    round_ = groups(plans)
    total = rounds * sum(
        len(names) * plan.blocks for names, cases in round_ for plan in cases.values()
    )
    # Drawn between blocks only: a thread that draws would disturb what is measured.
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("Measuring", total=total)
        try:
            times = measure_rounds(
                round_, rounds, lambda: progress.update(bar, advance=1, refresh=True)
            )
        except PeerFailed as error:
            raise click.ClickException(str(error)) from None
    calls = [case for case in plans if case in CALLS]
    training = {case: overheads(times, case) for case in plans if case in TRAINING}
    if calls:
        print_calls(times, calls)
    if calls and training:
        print()
    if training:
        print_training(training)
    if json_path is not None:
        seconds = {
            name: {case: flat(blocks) for case, blocks in cases.items()}
            for name, cases in times.items()
        }
        json_path.write_text(json.dumps({"seconds": seconds, "training": training}))


if __name__ == "__main__":
    main()
