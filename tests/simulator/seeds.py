"""The display of command lines that try many seeds: progress, and the seeds that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import Progress

SHOWN = 10  # failing seeds that are printed


class Advance(Protocol):
    """Called with the number of seeds that are done."""

    def __call__(self, done: int) -> None: ...


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Advance]:
    """Show a bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda done: progress.advance(bar, done)


def print_failures(failures: Sequence[tuple[int, str, str]]) -> int:
    """Print the first of the failures, (seed, description, command that replays it) each.

    Returns:
        The exit code: 0 if there are none, else 1.
    """
    for seed, wrong, command in failures[:SHOWN]:
        print(f"seed {seed}: {wrong}")
        print(f"    {command}")
    if len(failures) > SHOWN:
        print(f"... and {len(failures) - SHOWN} more")
    return 1 if failures else 0
