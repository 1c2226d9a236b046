"""Shows how a demo's training goes: a live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

import click
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from farcall.demos.progress import Progress


class Display(Protocol):
    """Where progress is shown."""

    def show(self, progress: Progress) -> None:
        """Shows where the run stands after an episode."""


class LogDisplay:
    """One plain line every `log_interval` episodes."""

    def __init__(self, log_interval: int) -> None:
        self._log_interval = log_interval

    def show(self, progress: Progress) -> None:
        """Prints the line when one is due."""
        if progress.episode % self._log_interval == 0:
            click.echo(describe(progress))


class LiveDisplay:
    """A line that is redrawn, and under it a bar that is full when the goal is met."""

    def __init__(self, live: Live, goal: float) -> None:
        self._live = live
        self._goal = goal

    def show(self, progress: Progress) -> None:
        """Redraws both."""
        bar = ProgressBar(total=self._goal, completed=max(0.0, progress.running_reward))
        self._live.update(Group(Text(describe(progress)), bar))


def describe(progress: Progress) -> str:
    """One line that says where the run stands; it fits a terminal of 80 columns."""
    return (
        f"episode {progress.episode:4d}  reward {progress.reward:3.0f}  "
        f"running reward {progress.running_reward:5.1f}  "
        f"{progress.env_steps_per_second:4.0f} env steps/s  "
        f"{progress.calls_per_second:4.0f} calls/s"
    )


@contextlib.contextmanager
def open_display(log_interval: int, goal: float) -> Iterator[Display]:
    """The display that fits standard output."""
    if not sys.stdout.isatty():
        click.echo("starting the workers")
        yield LogDisplay(log_interval)
        return
    with Live(Text("starting the workers"), transient=True) as live:
        yield LiveDisplay(live, goal)
