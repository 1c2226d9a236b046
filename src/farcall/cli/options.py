"""Options that several commands have, and the numbers that options take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

MOST_SECONDS = 1e6  # eleven days; the system's own waits take no more than twice as many

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class RealRange(click.FloatRange):
    """Numbers within bounds. "nan", which is within any bounds, is none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


class Seconds(RealRange):
    """Seconds that something may take: from 0 to as many as the system can wait."""

    def __init__(self, *, or_none: bool = True) -> None:
        super().__init__(0.0, MOST_SECONDS, min_open=not or_none)


def group_option() -> Option:
    """Return `--group`."""
    return click.option(
        "--group",
        type=click.IntRange(min=1),
        metavar="PID",
        help="Only the group that the process with this id is in.",
    )


def timeout_option() -> Option:
    """Return `--timeout`."""
    return click.option(
        "--timeout",
        type=Seconds(or_none=False),
        metavar="SECONDS",
        default=1.0,
        show_default=True,
        help="How long a worker may take to answer.",
    )
