"""The ends of one process's calls, in a file that outlives it, since processes are killed."""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy

THREADS = 3
KINDS = (
    "echo", "tensor", "nested", "many", "fails", "cancelled", "remote", "to_here", "lent", "given",
    "references", "layer", "forward", "backward", "gradients",
)  # fmt: skip
OUTCOMES = (
    "value", "ZeroDivisionError", "PeerLost", "OwnerDied", "RpcTimeout", "Cancelled", "RemoteError",
    "UnknownWorker", "LinkError", "unexpected",
)  # fmt: skip
TYPE, SHAPE = "float64", (THREADS, 1 + len(KINDS) * len(OUTCOMES))


class Late(NamedTuple):
    """A call that was not over at its deadline. Times are of `time.monotonic`, as everywhere."""

    kind: str
    began: float
    ended: float


class Ledger:
    """A row of numbers for each thread: when its call began, or 0, and how many ended in which way.

    Args:
        folder: of all ledgers.
        process: a name that no other process has.
        timeout: seconds of each call.
    """

    def __init__(self, folder: Path, process: str, timeout: float) -> None:
        self._late = folder / f"{process}.late"
        self._unexpected = folder / f"{process}.unexpected"
        self._calls = folder / f"{process}.calls"
        self._timeout = timeout

    def open(self) -> None:
        """Begin it, before the first call."""
        self._calls.write_bytes(numpy.zeros(SHAPE, TYPE).tobytes())

    def timed(self, thread: int) -> Callable[[str, Callable[[], Any]], Any]:
        """Return the function that makes the calls of one thread."""
        row = numpy.memmap(self._calls, dtype=TYPE, mode="r+", shape=SHAPE)[thread]

        def call(kind: str, function: Callable[[], Any]) -> Any:
            outcome = "value"
            row[0] = began = time.monotonic()
            try:
                return function()
            except Exception as error:
                outcome = type(error).__name__
                raise
            finally:
                self._note_late(Late(kind, began, time.monotonic()))
                number = OUTCOMES.index(outcome if outcome in OUTCOMES else "unexpected")
                row[1 + KINDS.index(kind) * len(OUTCOMES) + number] += 1
                row[0] = 0.0

        return call

    def note_unexpected(self) -> None:
        """Write down the exception that is being handled, if there is room for more."""
        with self._unexpected.open("a") as file:
            if file.tell() < 1 << 16:
                file.write(traceback.format_exc())

    def _note_late(self, late: Late) -> None:
        if late.ended - late.began > self._timeout:
            with self._late.open("a") as file:
                file.write(json.dumps(late) + "\n")

    # Numbers that the trial reads, also when the process has gone or has not come so far.

    def _rows(self) -> numpy.ndarray:
        rows = numpy.fromfile(self._calls, TYPE) if self._calls.exists() else numpy.empty(0)
        return rows.reshape(SHAPE) if rows.size else numpy.zeros(SHAPE, TYPE)

    def late(self) -> list[Late]:
        lines = self._late.read_text().splitlines() if self._late.exists() else []
        return [Late(*json.loads(line)) for line in lines]

    def running(self) -> list[float]:
        """Return when the calls began that have no outcome."""
        return [float(began) for began in self._rows()[:, 0] if began]

    def unexpected(self) -> str:
        return self._unexpected.read_text() if self._unexpected.exists() else ""

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many calls of each kind ended in which way."""
        sums = self._rows()[:, 1:].sum(axis=0).reshape(len(KINDS), len(OUTCOMES))
        return Counter(
            {
                (kind, outcome): int(sums[i, j])
                for i, kind in enumerate(KINDS)
                for j, outcome in enumerate(OUTCOMES)
                if sums[i, j]
            }
        )
