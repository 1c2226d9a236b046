"""When to look again at once, and when to sleep.

Waking a thread on an idle core costs tens of microseconds; looking again costs one. So a thread
whose peer has lately answered quickly looks for a while before it sleeps. How long waits
lately were decides, so no thread spins for a slow peer, nor on a machine that is too busy to answer
quickly; and an endpoint never has more spinning threads than there are cores besides its own. A
spinning thread offers its core to others each time, and goes to sleep as soon as another one takes
the core or the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

MAX_SPIN_SECONDS = 2e-3
WORTH_SECONDS = 2e-3  # waits longer than this are slept through
STALL_SECONDS = 300e-6  # a look takes far less, unless others use the core or the GIL
WEIGHT = 0.1

T = TypeVar("T")

offer_core: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


def spare_cores() -> int:
    """Cores that this process may use, less one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) - 1
    return (os.cpu_count() or 1) - 1


class SpinBudget:
    """Lets a limited number of threads of one endpoint spin at once. Thread-safe."""

    def __init__(self, threads: int | None = None) -> None:
        # Taken and given back with pop and append, which need no lock.
        self._permits = [None] * (spare_cores() if threads is None else threads)

    def take(self) -> bool:
        try:
            self._permits.pop()
        except IndexError:
            return False
        return True

    def give_back(self) -> None:
        self._permits.append(None)


class Spinner:
    """One place where threads wait, one at a time, with its memory of how long waits were."""

    __slots__ = ("_average", "_budget")

    def __init__(self, budget: SpinBudget) -> None:
        self._budget = budget
        self._average = 0.0

    def wait(self, look: Callable[[], T], sleep: Callable[[], T]) -> T:
        """Return the result of `look`, if it comes soon, else that of `sleep`."""
        start = monotonic()
        try:
            if self._average < WORTH_SECONDS and self._budget.take():
                try:
                    end = start + MAX_SPIN_SECONDS
                    before = start
                    while (now := monotonic()) < end and now - before < STALL_SECONDS:
                        before = now
                        found = look()
                        if found:
                            return found
                        offer_core()
                finally:
                    self._budget.give_back()
            return sleep()
        finally:
            waited = min(monotonic() - start, 10 * WORTH_SECONDS)
            self._average += WEIGHT * (waited - self._average)
