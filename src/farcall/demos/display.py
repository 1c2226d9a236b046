"""Shows how a demo's training goes: a live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import click
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

STARTING = "starting the workers"

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)


def never(progress: object) -> bool:
    """Return False: no progress is like that."""
    return False


@dataclass(frozen=True)
class View(Generic[P]):
    """The sentences of a demo about its progress.

    Attributes:
        describe: one line that says where the run stands; it fits a terminal of 80 columns.
        fraction: how much of the run is done, 0 to 1; a larger number counts as 1.
        scale: the same in words, with the goal: "12 of 475".
        is_logged: whether it gets a log line, where standard output is not a terminal.
        stays: whether its line stays on the terminal, above the live one.
    """

    describe: Callable[[P], str]
    fraction: Callable[[P], float]
    scale: Callable[[P], str]
    is_logged: Callable[[P], bool]
    stays: Callable[[P], bool] = never


class Display(Protocol[P_contra]):
    """The place where progress is shown."""

    def show_started(self, started: int, workers: int) -> None:
        """Shows how many workers have started, of how many."""

    def show(self, progress: P_contra) -> None:
        """Shows where the run stands."""

    def tell(self, line: str) -> None:
        """Shows a line that stays. May be called by any thread."""


class LogDisplay(Generic[P]):
    """One plain line when one is due."""

    def __init__(self, view: View[P]) -> None:
        self._view = view

    def show_started(self, started: int, workers: int) -> None:
        """Prints the number, on standard error: standard output is for the training."""
        if started:
            click.echo(f"{started} of {workers} workers", err=True)

    def show(self, progress: P) -> None:
        """Prints the line when one is due."""
        if self._view.is_logged(progress):
            click.echo(self._view.describe(progress))

    def tell(self, line: str) -> None:
        """Prints the line."""
        click.echo(line)


class LiveDisplay(Generic[P]):
    """A line that is redrawn, and under it a bar that is full when the run is done."""

    def __init__(self, live: Live, view: View[P]) -> None:
        self._live = live
        self._view = view
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._task = self._bar.add_task("", total=None)
        self._draw(STARTING)

    def show_started(self, started: int, workers: int) -> None:
        """Redraws both: the bar is full when all have started."""
        scale = f"{started} of {workers} workers"
        self._bar.update(self._task, total=workers, completed=started, description=scale)
        self._draw(STARTING)

    def show(self, progress: P) -> None:
        """Redraws both."""
        line = self._view.describe(progress)
        if self._view.stays(progress):
            self._live.console.print(Text(line))
        done = min(1.0, max(0.0, self._view.fraction(progress)))
        scale = self._view.scale(progress)
        self._bar.update(self._task, total=1.0, completed=done, description=scale)
        self._draw(line)

    def tell(self, line: str) -> None:
        """Prints the line above the live one."""
        self._live.console.print(Text(line))

    def _draw(self, line: str) -> None:
        self._live.update(Group(Text(line), self._bar))


@contextlib.contextmanager
def open_display(view: View[P]) -> Iterator[Display[P]]:
    """Open the display that fits standard output."""
    if not sys.stdout.isatty():
        click.echo(STARTING)
        yield LogDisplay(view)
        return
    with Live(Text(STARTING), transient=True) as live:
        yield LiveDisplay(live, view)
