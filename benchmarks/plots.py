"""Pictures of measurements: ratios by case, and how the times are distributed."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from plans import AT_LEAST, BEFORE, CASES, EVERY, LOCAL, TORCH
from table import Result, flat
from turns import Blocks

COLUMNS = 4
COLOURS = {name: f"C{index}" for index, name in enumerate((*EVERY, LOCAL, BEFORE))}
LEAST_RATIO = 0.1  # nothing can be drawn at 0


def draw_ratios(results: dict[str, Result]) -> Figure:
    """Draw ratios of others' times to farcall's; a diamond where torch's should be."""
    names = [
        name for name in (*EVERY, BEFORE) if any(name in each.ratios for each in results.values())
    ]
    height = 0.8 / max(1, len(names))
    figure = Figure(
        figsize=(8, 1.5 + len(results) * (0.2 + 0.15 * len(names))), layout="constrained"
    )
    axes = figure.subplots()
    for index, name in enumerate(names):
        found = {
            place + height * (index + 0.5) - 0.4: result.ratios[name].median
            for place, result in enumerate(results.values())
            if name in result.ratios
        }
        ratios = {
            place: max(ratio, LEAST_RATIO) for place, ratio in found.items() if ratio is not None
        }
        widths = [ratio - 1 for ratio in ratios.values()]
        bars = axes.barh(list(ratios), widths, height, left=1, color=COLOURS[name], label=name)
        axes.bar_label(bars, [f"{ratio:.3g}" for ratio in ratios.values()], padding=2, fontsize=7)
    bars_of = [place for place, case in enumerate(results) if case in AT_LEAST]
    limits = [AT_LEAST[case] for case in results if case in AT_LEAST]
    if TORCH in names:
        axes.plot(limits, bars_of, "kd", markersize=5, label="torch, at least")
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), list(results))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("times farcall's")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(names) + 1)
    return figure


def draw_times(blocks: dict[str, dict[str, Blocks]]) -> Figure:
    """Draw, for each case, the share of the times up to each length. `blocks` are by case."""
    columns = min(COLUMNS, len(blocks))
    rows = math.ceil(len(blocks) / columns)
    figure = Figure(figsize=(3.5 * columns, 0.6 + 2.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (case, by_implementation) in zip(grid, blocks.items(), strict=False):
        draw_distribution(axes, case, by_implementation)
    for axes in grid[len(blocks) :]:
        axes.remove()
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def draw_distribution(axes: Axes, case: str, blocks: dict[str, Blocks]) -> None:
    unit = CASES[case].unit
    for name, each in blocks.items():
        axes.ecdf([unit.of(seconds) for seconds in flat(each)], color=COLOURS[name], label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(case, fontsize="small")
    axes.set_xlabel(unit.name, fontsize="small")
    axes.tick_params(labelsize="x-small", which="both")
    axes.grid(alpha=0.3)
