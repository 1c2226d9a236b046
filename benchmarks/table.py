"""The results of the times: medians, ratios, goals that are reached, and the table of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from plans import (
    ADDS_AT_MOST_PERCENT,
    AT_LEAST,
    AT_MOST,
    BEFORE,
    BOTH,
    CASES,
    EVERY,
    FARCALL,
    LOCAL,
    PER_STEP_AT_LEAST,
    TORCH,
)
from turns import Blocks

NONE = "-"


class Quartiles(NamedTuple):
    """Over blocks that ran next to each other. None stands for infinite."""

    low: float | None
    median: float | None
    high: float | None


@dataclass(frozen=True)
class Times:
    """Of one implementation in one case, in the case's unit, with its excess over `local`."""

    median: float
    percentile_99: float
    adds: float | None = None
    adds_percent: Quartiles | None = None


@dataclass(frozen=True)
class Result:
    """Of one case."""

    unit: str
    times: dict[str, Times]  # by implementation
    # How much longer an implementation takes than farcall, or how much more it adds to `local`. By
    # implementation, without farcall and local; infinite where farcall adds nothing.
    ratios: dict[str, Quartiles]
    # How much longer an implementation takes than farcall, whatever one process takes.
    step_ratios: dict[str, Quartiles]
    bar: str | None  # what farcall has to reach
    is_met: bool | None


def flat(blocks: Blocks) -> list[float]:
    return list(itertools.chain.from_iterable(blocks))


def percentile_99(times: list[float]) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def ratio(theirs: float, ours: float, local: float) -> float:
    """Infinite if only they add to `local`, 1 if neither does."""
    if ours > local:
        return max(0.0, theirs - local) / (ours - local)
    return math.inf if theirs > local else 1.0


def ratio_of(theirs: Blocks, ours: Blocks, local: Blocks | None) -> Quartiles:
    """Return the ratio, with nothing in place of `local` if there is none."""
    local = local or [[0.0]] * len(ours)
    return quartiles(
        ratio(*map(statistics.median, blocks)) for blocks in zip(theirs, ours, local, strict=True)
    )


def quartiles(numbers: Iterable[float]) -> Quartiles:
    ordered = sorted(numbers)
    count = len(ordered)
    found = ordered[count // 4], statistics.median(ordered), ordered[count * 3 // 4]
    return Quartiles(*(each if math.isfinite(each) else None for each in found))


def times_of(case: str, blocks: Blocks, local: Blocks | None) -> Times:
    unit = CASES[case].unit
    median = unit.of(statistics.median(flat(blocks)))
    tail = unit.of(percentile_99(flat(blocks)))
    if local is None:
        return Times(median, tail)
    alone = unit.of(statistics.median(flat(local)))
    percent = quartiles(
        (statistics.median(ours) / statistics.median(base) - 1) * 100
        for ours, base in zip(blocks, local, strict=True)
    )
    return Times(median, tail, median - alone, percent)


def result_of(case: str, blocks: dict[str, Blocks]) -> Result:
    """`blocks` by implementation; farcall's and all others' that were measured."""
    local = blocks.get(LOCAL)
    times = {
        name: times_of(case, each, None if name == LOCAL else local)
        for name, each in blocks.items()
    }
    others = {name: each for name, each in blocks.items() if name not in (FARCALL, LOCAL)}
    ratios = {name: ratio_of(each, blocks[FARCALL], local) for name, each in others.items()}
    steps = {name: ratio_of(each, blocks[FARCALL], None) for name, each in others.items()}
    bar = reached(case, times[FARCALL], ratios, steps)
    return Result(CASES[case].unit.name, times, ratios, steps, *bar)


def reached(
    case: str, ours: Times, ratios: dict[str, Quartiles], step_ratios: dict[str, Quartiles]
) -> tuple[str, bool] | tuple[None, None]:
    """Return the goal of farcall in a case, if any, and whether it is reached."""
    if case in PER_STEP_AT_LEAST and TORCH in step_ratios:
        found = step_ratios[TORCH].median
        limit = PER_STEP_AT_LEAST[case]
        return f"{limit:g} x per step", found is None or found >= limit
    if case in AT_LEAST and TORCH in ratios:
        found = ratios[TORCH].median
        return f"{AT_LEAST[case]:g} x", found is None or found >= AT_LEAST[case]
    if case in ADDS_AT_MOST_PERCENT and ours.adds_percent is not None:
        limit, found = ADDS_AT_MOST_PERCENT[case], ours.adds_percent.median
        return f"adds at most {limit:g} %", found is not None and found <= limit
    if case in AT_MOST:
        return f"at most {AT_MOST[case]:g} {CASES[case].unit.name}", ours.median <= AT_MOST[case]
    return None, None


def number(value: float | None) -> str:
    """Return about three digits; "inf" for None."""
    if value is None:
        return "inf"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def show_times(times: Times | None) -> str:
    if times is None:
        return NONE
    shown = f"{number(times.median)} ({number(times.percentile_99)})"
    if times.adds is not None and times.adds_percent is not None:
        shown += f", adds {number(times.adds)} = {show_quartiles(times.adds_percent)} %"
    return shown


def show_quartiles(found: Quartiles | None) -> str:
    if found is None:
        return NONE
    return f"{number(found.median)} ({number(found.low)} to {number(found.high)})"


def show_ratio(result: Result, name: str) -> str:
    """Return how many times an implementation's time is farcall's; of what both add, and of all."""
    shown = show_quartiles(result.ratios.get(name))
    if LOCAL in result.times and name in result.step_ratios:
        shown += f", per step {show_quartiles(result.step_ratios[name])}"
    return shown


def show_bar(result: Result) -> list[str]:
    """Return two cells: the bar, and whether it is met."""
    if result.bar is None:
        return [NONE, NONE]
    return [result.bar, "yes" if result.is_met else "no"]


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown(results: dict[str, Result]) -> str:
    """Return a table with one line for each case.

    Times are medians, with the 99th percentile in parentheses; ratios medians over blocks, with the
    other quartiles.
    """
    found = {name for result in results.values() for name in result.times}
    with_local = [LOCAL] if LOCAL in found else []
    more = [name for name in EVERY if name in found and name not in BOTH]
    columns = [*(name for name in (FARCALL, BEFORE, TORCH) if name in found), *with_local, *more]
    compared = [name for name in columns if name not in (FARCALL, LOCAL)]
    titles = ["one process" if name == LOCAL else name for name in columns]
    lines = [
        ["case", "unit", *titles, *(f"{name} / farcall" for name in compared), "to reach", "met"]
    ]
    lines.append(["---"] * len(lines[0]))
    for case, result in results.items():
        times = [show_times(result.times.get(name)) for name in columns]
        ratios = [show_ratio(result, name) for name in compared]
        lines.append([case, result.unit, *times, *ratios, *show_bar(result)])
    return "\n".join(map(line, lines))
