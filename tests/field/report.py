"""The demands of a trial and its measurements, as rows of one table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

WIDTHS = (8, 60, 8)  # of trial, demand and verdict; the measurement comes last


@dataclass
class Report:
    """Prints a row as soon as it is known, and remembers whether all demands were met."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    trial: str = ""
    failed: int = 0
    demanded: int = 0

    def heading(self) -> None:
        self._row("trial", "demanded", "", "measured")

    def demand(self, what: str, measured: object, is_met: bool) -> None:
        self.demanded += 1
        self.failed += not is_met
        self._row(self.trial, what, "ok" if is_met else "FAILED", str(measured))

    def note(self, text: str) -> None:
        self._row(self.trial, "", "", text)

    def skip(self, what: str, why: str) -> None:
        self._row(self.trial, what, "skipped", why)

    def _row(self, trial: str, what: str, verdict: str, measured: str) -> None:
        cells = (
            text.ljust(width) for text, width in zip((trial, what, verdict), WIDTHS, strict=True)
        )
        print(*cells, measured, file=self.out, flush=True)


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    folder: Path  # for stores and logs, empty at the start
    seconds: float  # how long the chaos lasts
    allowed: float  # seconds after a call's deadline, of the chaos
    pause: float  # seconds between the calls of a thread, in the chaos
    workers: int  # of the trial `many`
    seed: int
    calls: int  # of the trial `soak`, with those that references and passes make
    references: int
    passes: int


Trial = Callable[[Report, Settings], None]
