"""The credit of a backward pass, which shows when the pass is over.

The root of a pass begins with all of the credit. A worker that sends gradients gives away half of
its credit, or all with its last message; one that has nothing to send gives its credit back. When
the root has all of it again, the pass is over everywhere (BWD-3), and a chain of workers needs no
answers.
Every amount is 2**-n of the whole, and is written as n. (F. Mattern, "Global quiescence detection
based on credit distribution and recovery", 1989.)
"""

from __future__ import annotations

WHOLE = 0  # all of a pass's credit


class HeldCredit:
    """At any worker: the credit of the sources that run there."""

    def __init__(self) -> None:
        self._credit: dict[int, int] = {}

    def arrive(self, source: int, credit: int) -> None:
        """Keep the credit that came with the gradient of a source."""
        self._credit[source] = credit

    def send(self, source: int, last: bool = False) -> int:
        """Take the credit that goes with a message for this source: half of it, or all."""
        if last:
            return self._credit.pop(source)
        self._credit[source] += 1
        return self._credit[source]

    def ran(self, source: int) -> int | None:
        """Take the credit to give back to the root; None if all of it went with messages."""
        return self._credit.pop(source, None)


class RecoveredCredit:
    """At the root: the credit that came back. Adds amounts up as binary numbers."""

    def __init__(self) -> None:
        self._credit: set[int] = set()

    def add(self, credit: int) -> bool:
        """Add credit that came back; return whether all has: then the pass is over everywhere."""
        while credit in self._credit:
            self._credit.remove(credit)
            credit -= 1
        self._credit.add(credit)
        return credit == WHOLE
