"""The runs of `make bench` that are kept: a JSON file of each in `benchmarks/history/`.

A kept run has the medians, not the single times, and the facts that they depend on. Imports nothing
but the standard library: tests read the files, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkout import Checkout

LEAST_ROUNDS = 3
BEFORE = "before"  # of another checkout, whose commit is not that of the run
AGAIN = "then run `make bench` again"


@dataclass(frozen=True)
class KeptCase:
    """The medians of one case.

    `ratio` has the quartiles (25, 50 and 75 %) of torch's time by farcall's, over blocks that ran
    next to each other; None stands for infinite.
    """

    unit: str
    medians: dict[str, float]  # by implementation, in the unit
    ratio: tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class KeptRun:
    """One run: when, of which commit, on which machine, and its numbers."""

    date: str  # UTC, "2026-11-28T15:20Z": the order of the runs
    commit: str
    machine: str  # in words
    python: str
    torch: str
    rounds: int
    cases: dict[str, KeptCase]

    @property
    def day(self) -> str:
        return self.date.partition("T")[0]

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return f"{self.date.replace(':', '')}-{self.commit[:12]}.json"


def refusal(run: Mapping[str, Any], now: Checkout) -> str | None:
    """Return why a run can't be kept and what to do about it, or None if it can.

    Args:
        run: the part `run` of bench.json.
        now: the state of the checkout.
    """
    if now.commit is None:
        return "this is no checkout of git, so no commit belongs to the run: clone it with git"
    if not run["clean"]:
        return (
            "files differed from the commit, or changed, while the run was measured: "
            f"commit or remove them, {AGAIN}"
        )
    if run["commit"] != now.commit:
        return (
            f"the run measured commit {run['commit'][:12]}, and HEAD is {now.commit[:12]}: check "
            f"that commit out to keep the run, or {AGAIN.removeprefix('then ')}"
        )
    if not now.is_clean:
        return (
            "files differ from the commit: commit, stash or remove them (`git status` lists them)"
        )
    if run["rounds"] < LEAST_ROUNDS:
        return (
            f"the run has {run['rounds']} of at least {LEAST_ROUNDS} rounds: "
            f"leave `--rounds` out, {AGAIN}"
        )
    if not run["complete"]:
        return (
            "the run left cases, blocks or torch out: leave `--cases`, `--blocks` and "
            f"`--implementations` out of BENCH_ARGS, {AGAIN}"
        )
    return None


def run_to_keep(bench: Mapping[str, Any]) -> KeptRun:
    """Return the part of bench.json that is kept."""
    run, machine = bench["run"], bench["machine"]
    cases = {
        case: KeptCase(
            result["unit"],
            {
                name: rounded(times["median"])
                for name, times in result["times"].items()
                if name != BEFORE
            },
            _three(
                [None if one is None else rounded(one) for one in result["step_ratios"]["torch"]]
            ),
        )
        for case, result in bench["results"].items()
    }
    return KeptRun(
        run["date"],
        run["commit"],
        run["machine"],
        machine["python"],
        machine["versions"]["torch"],
        run["rounds"],
        cases,
    )


def rounded(number: float | None) -> float | None:
    """Round to four digits: more would be noise."""
    return None if number is None else float(f"{number:.4g}")


def _three(numbers: list[Any]) -> tuple[Any, Any, Any]:
    low, median, high = numbers
    return low, median, high


def written(run: KeptRun) -> str:
    """Return the text of the file of a run."""
    return json.dumps(asdict(run), indent=1, allow_nan=False) + "\n"


def read(text: str) -> KeptRun:
    """Return the run of which this is the file."""
    found = json.loads(text)
    cases = {
        case: KeptCase(one["unit"], one["medians"], _three(one["ratio"]))
        for case, one in found.pop("cases").items()
    }
    return KeptRun(**found, cases=cases)


def kept_runs(folder: Path) -> list[KeptRun]:
    """Return all runs of a folder, the newest last."""
    runs = [read(path.read_text("utf-8")) for path in folder.glob("*.json")]
    return sorted(runs, key=lambda run: (run.date, run.commit))
