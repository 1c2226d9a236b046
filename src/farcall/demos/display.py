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
from rich.progress_bar import ProgressBar
from rich.text import Text

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)


def never(progress: object) -> bool:
    """No progress is like that."""
    return False


@dataclass(frozen=True)
class View(Generic[P]):
    """What a demo says about its progress.

    Attributes:
        describe: one line that says where the run stands; it fits a terminal of 80 columns.
        fraction: how much of the run is done, 0 to 1; what is beyond is cut off.
        is_logged: whether it gets a log line, where standard output is not a terminal.
        stays: whether its line stays on the terminal, above the live one.
    """

    describe: Callable[[P], str]
    fraction: Callable[[P], float]
    is_logged: Callable[[P], bool]
    stays: Callable[[P], bool] = never


class Display(Protocol[P_contra]):
    """Where progress is shown."""

    def show(self, progress: P_contra) -> None:
        """Shows where the run stands."""


class LogDisplay(Generic[P]):
    """One plain line when one is due."""

    def __init__(self, view: View[P]) -> None:
        self._view = view

    def show(self, progress: P) -> None:
        """Prints the line when one is due."""
        if self._view.is_logged(progress):
            click.echo(self._view.describe(progress))


class LiveDisplay(Generic[P]):
    """A line that is redrawn, and under it a bar that is full when the run is done."""

    def __init__(self, live: Live, view: View[P]) -> None:
        self._live = live
        self._view = view

    def show(self, progress: P) -> None:
        """Redraws both."""
        line = Text(self._view.describe(progress))
        if self._view.stays(progress):
            self._live.console.print(line)
        fraction = min(1.0, max(0.0, self._view.fraction(progress)))
        self._live.update(Group(line, ProgressBar(total=1.0, completed=fraction)))


@contextlib.contextmanager
def open_display(view: View[P]) -> Iterator[Display[P]]:
    """The display that fits standard output."""
    if not sys.stdout.isatty():
        click.echo("starting the workers")
        yield LogDisplay(view)
        return
    with Live(Text("starting the workers"), transient=True) as live:
        yield LiveDisplay(live, view)
