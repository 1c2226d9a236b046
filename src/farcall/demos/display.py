"""Shows how a demo's training goes: a live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

import click
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as LiveProgress

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
    """One line that is redrawn, with a bar that is full when the goal is met."""

    def __init__(self, live: LiveProgress, goal: float) -> None:
        self._live = live
        self._task = live.add_task("starting the workers", total=goal)

    def show(self, progress: Progress) -> None:
        """Redraws the line."""
        self._live.update(
            self._task, completed=progress.running_reward, description=describe(progress)
        )


def describe(progress: Progress) -> str:
    """One line that says where the run stands."""
    return (
        f"episode {progress.episode:4d}  reward {progress.reward:5.0f}  "
        f"running reward {progress.running_reward:6.1f}  "
        f"{progress.env_steps_per_second:6.0f} env steps/s  "
        f"{progress.calls_per_second:6.0f} calls/s"
    )


@contextlib.contextmanager
def open_display(log_interval: int, goal: float) -> Iterator[Display]:
    """The display that fits standard output."""
    if not sys.stdout.isatty():
        click.echo("starting the workers")
        yield LogDisplay(log_interval)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
    )
    with LiveProgress(*columns, transient=True) as live:
        yield LiveDisplay(live, goal)
