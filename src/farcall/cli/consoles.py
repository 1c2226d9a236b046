"""Consoles on which commands print tables."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 400  # characters: what reads a pipe breaks no lines


def console_for_tables() -> Console:
    """Return a console as wide as the terminal, or wide enough for any row where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)
