"""Files and lines that a demo leaves behind: a summary line, `summary.json`, pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import click
from matplotlib.figure import Figure

FAILED, INTERRUPTED = 1, 130
DPI = 120


class Summary(Protocol):
    """The outcome of a run."""

    def line(self) -> str:
        """Return the one line that ends a run."""

    def fields(self) -> dict[str, object]:
        """Return the fields of `summary.json`, the run's options among them."""


def write_report(out: Path, summary: Summary, figures: Mapping[str, Figure]) -> None:
    """Writes `summary.json` and, for every figure, `<name>.png` into the existing folder `out`.

    Prints where they are, on standard error.
    """
    text = json.dumps(summary.fields(), indent=2, allow_nan=False) + "\n"
    (out / "summary.json").write_text(text, encoding="utf-8")
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=DPI)
        click.echo(f"picture: {out / name}.png", err=True)
    click.echo(f"numbers: {out / 'summary.json'}", err=True)


def print_end(summary: Summary, failure: str | None) -> None:
    """Prints the summary line and, on standard error, what went wrong if something did."""
    click.echo(summary.line())
    if failure:
        click.echo(f"Error: {failure}", err=True)


def endured(deaths: Mapping[str, int]) -> str:
    """Return the number of killed workers by role, to end the summary with; "" if none was."""
    return "".join(f", {count} x {role} killed" for role, count in sorted(deaths.items()))
