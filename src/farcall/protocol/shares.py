"""Shares of a backward pass, which show when it is over.

The root of a pass begins with all of it. A worker that sends gradients gives away half of its
share, or all with its last message; one that has nothing to send gives its share back. When the
root has all of it again, the pass is over everywhere (BWD-3), and a chain of workers needs no
answers.
Every share is 2**-n of the pass, and is written as n. (F. Mattern, "Global quiescence detection
based on credit distribution and recovery", 1989.)
"""

from __future__ import annotations

WHOLE = 0  # the share that is all of a pass


class Shares:
    """At any worker: the shares of the sources that run there."""

    def __init__(self) -> None:
        self._shares: dict[int, int] = {}

    def arrive(self, source: int, share: int) -> None:
        """A share came with the gradient of a source."""
        self._shares[source] = share

    def send(self, source: int, last: bool = False) -> int:
        """The share that goes with a message for this source: half of what is left, or all."""
        if last:
            return self._shares.pop(source)
        self._shares[source] += 1
        return self._shares[source]

    def ran(self, source: int) -> int | None:
        """Return the share to give back to the root, or None if all of it went with messages."""
        return self._shares.pop(source, None)


class Returned:
    """At the root: the shares that nobody works on any more. Adds them up as binary numbers."""

    def __init__(self) -> None:
        self._shares: set[int] = set()

    def add(self, share: int) -> bool:
        """A share came back. Returns whether that was the last one: the pass is over everywhere."""
        while share in self._shares:
            self._shares.remove(share)
            share -= 1
        self._shares.add(share)
        return share == WHOLE
