"""Charts of kept runs, as SVG: the newest run for the README, and all runs for the site.

The text of a chart depends on the runs alone, so a test can tell whether a chart is current. Every
font is a little different, and no text is measured here: places are fixed, and texts short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from kept import KeptCase, KeptRun

FARCALL, TORCH = "farcall", "torch"
COLOURS = {FARCALL: "#1f77b4", TORCH: "#ff7f0e"}
# For the README, one case of each kind. The page of the history has all.
TITLES = {
    "noop": "empty function",
    "echo4": "echo of 4 floats",
    "rref_method": "method of a reference",
    "echo_1mb": "echo of 1 MB",
    "push_128mb": "128 MB one way",
    "in_flight": "5,000 calls in flight",
    "threads": "8 threads call",
    "ring": "ring of 8 workers",
    "noop_tcp": "empty function, TCP",
    "cartpole_1": "CartPole, 1 observer",
    "rnn_tiny": "small language model",
    "rnn_real": "large language model",
    "ddp": "with DDP, 2 trainers",
    "parameter_server_sync": "parameter server",
    "start_2": "start of 2 workers",
}
# Units of speeds: there the longer bar would be the better one.
SPEEDS = ("calls/s", "steps/s")

LABELS, BARS, WIDTH = 170, 330, 700
BAR, GAP, TOP = 11, 8, 58


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return a picture on white ground, whose title tells readers that see no pictures."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, words: str, **attributes: str) -> str:
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{given}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


def shown(number: float) -> str:
    """Show about three digits, without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:,.{digits}f}"


def ran(run: KeptRun) -> str:
    return f"{run.day}, commit {run.commit[:12]}, torch {run.torch}, {run.rounds} rounds"


def times_of(case: KeptCase) -> dict[str, float]:
    """Return the lengths of the bars: times, in whatever unit."""
    medians = {name: case.medians[name] for name in COLOURS}
    if case.unit in SPEEDS:
        return {name: 1 / speed for name, speed in medians.items()}
    return medians


def draw_newest(run: KeptRun) -> str:
    """Draw farcall's time beside torch's, by case; the longer of the two has the full length."""
    parts = [
        text(
            LABELS,
            18,
            "Time of farcall and of torch.distributed.rpc; shorter is better",
            font_weight="bold",
        ),
        text(LABELS, 34, run.machine),
        text(LABELS, 49, ran(run)),
    ]
    y = float(TOP)
    for name, title in TITLES.items():
        if name not in run.cases:
            continue
        case = run.cases[name]
        times = times_of(case)
        longest = max(times.values())
        parts.append(text(LABELS - 8, y + BAR + 4, title, text_anchor="end"))
        for row, (who, colour) in enumerate(COLOURS.items()):
            length = BARS * times[who] / longest
            at = y + row * (BAR + 1)
            label = f"{who} {shown(case.medians[who])} {case.unit}"
            parts.append(bar(LABELS, at, length, colour))
            parts.append(text(LABELS + length + 5, at + BAR - 1, label, font_size="10"))
        if case.ratio[1] is not None:
            ratio = f"{shown_ratio(case.ratio[1])} x"
            parts.append(
                text(WIDTH - 12, y + BAR + 4, ratio, text_anchor="end", font_weight="bold")
            )
        y += 2 * BAR + 1 + GAP
    return svg(WIDTH, round(y + 4), f"make bench: {ran(run)}", parts)


def shown_ratio(number: float) -> str:
    return f"{number:.0f}" if number >= 20 else f"{number:.1f}"


COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 4, 190, 112
LEFT, RIGHT, ABOVE, BELOW = 34, 12, 24, 18


def draw_history(runs: Sequence[KeptRun]) -> str:
    """Draw torch's time by farcall's in all runs, a panel for each case, with its quartiles."""
    names = list(dict.fromkeys(name for run in reversed(runs) for name in run.cases))
    rows = math.ceil(len(names) / COLUMNS)
    parts = [
        text(
            LEFT,
            18,
            "torch's time by farcall's, run by run (logarithmic; the line is 1)",
            font_weight="bold",
        )
    ]
    for place, name in enumerate(names):
        row, column = divmod(place, COLUMNS)
        parts += panel(name, runs, column * PANEL_WIDTH, 26 + row * PANEL_HEIGHT)
    title = f"make bench, {len(runs)} kept runs, the newest: {ran(runs[-1])}"
    return svg(COLUMNS * PANEL_WIDTH, 26 + rows * PANEL_HEIGHT, title, parts)


def panel(name: str, runs: Sequence[KeptRun], x: int, y: int) -> list[str]:
    """Draw one case: a point for each run, with a line from quartile to quartile."""
    found = {
        place: (low or median, median, high or median)
        for place, run in enumerate(runs)
        if name in run.cases
        for low, median, high in [run.cases[name].ratio]
        if median is not None and median > 0
    }
    values = [1.0, *(value for ratios in found.values() for value in ratios)]
    lowest, highest = (math.log10(end) for end in (min(values) / 1.3, max(values) * 1.3))
    width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - ABOVE - BELOW

    def across(place: int) -> float:
        return x + LEFT + width * (place + 0.5) / len(runs)

    def up(value: float) -> float:
        return y + ABOVE + height * (highest - math.log10(value)) / (highest - lowest)

    parts = [
        text(x + LEFT, y + ABOVE - 6, name),
        f'<rect x="{x + LEFT}" y="{y + ABOVE}" width="{width}" height="{height}" fill="none" '
        'stroke="#cccccc"/>',
        f'<line x1="{x + LEFT}" x2="{x + LEFT + width}" y1="{up(1):.1f}" y2="{up(1):.1f}" '
        'stroke="#999999"/>',
        text(x + LEFT - 4, up(1) + 3, "1", text_anchor="end", font_size="9"),
    ]
    if not found:
        return parts
    points = " ".join(f"{across(place):.1f},{up(each[1]):.1f}" for place, each in found.items())
    colour = COLOURS[FARCALL]
    parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    for place, (low, median, high) in found.items():
        at = f"{across(place):.1f}"
        parts.append(
            f'<line x1="{at}" x2="{at}" y1="{up(low):.1f}" y2="{up(high):.1f}" stroke="{colour}"/>'
        )
        parts.append(f'<circle cx="{at}" cy="{up(median):.1f}" r="2.5" fill="{colour}"/>')
    last = max(found)
    label = f"{shown_ratio(found[last][1])} x, {runs[last].day}"
    parts.append(
        text(x + LEFT + width, y + PANEL_HEIGHT - 6, label, text_anchor="end", font_size="9")
    )
    return parts
