"""farcall against torch.distributed.rpc on this machine, in turn, in one run.

    python benchmarks/run.py [--rounds N] [--cases noop,echo4,...] [--json FILE]

Each round starts a fresh pair of processes for each implementation. The table gives medians over
all calls of all rounds, 99th percentiles, and the ratio of the medians (torch / farcall).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

IMPLEMENTATIONS = ("farcall", "torch")
CASES = ("noop", "echo4", "rref_method", "echo_1mb", "echo_16mb", "in_flight", "references")
PEER = Path(__file__).with_name("peer.py")


def measure(implementation: str, cases: str) -> dict[str, list[float]]:
    """Seconds per call, by case, from a fresh pair of processes."""
    command = [sys.executable, "-W", "ignore", str(PEER), implementation, cases]
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


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Fresh process pairs for each.")
@click.option("--cases", default=",".join(CASES), show_default=True, help="Which, with commas.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all times here.")
def main(rounds: int, cases: str, json_path: Path | None) -> None:
    """Compare farcall with torch.distributed.rpc."""
    times: dict[str, dict[str, list[float]]] = {name: {} for name in IMPLEMENTATIONS}
    turns = [(turn, name) for turn in range(rounds) for name in IMPLEMENTATIONS]
    for _, name in track(turns, "Measuring", console=Console(stderr=True)):
        for case, seconds in measure(name, cases).items():
            times[name].setdefault(case, []).extend(seconds)
    print("| case | farcall median us | p99 | torch median us | p99 | torch / farcall |")
    print("|---|---|---|---|---|---|")
    for case in cases.split(","):
        ours, ours99 = summary(times["farcall"][case])
        theirs, theirs99 = summary(times["torch"][case])
        print(
            f"| {case} | {ours:.1f} | {ours99:.1f} | {theirs:.1f} | {theirs99:.1f} "
            f"| {theirs / ours:.2f} |"
        )
    if json_path is not None:
        json_path.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
