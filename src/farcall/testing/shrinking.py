"""A failing schedule made small: fewer faults, fewer steps, and still the same promise broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple

from farcall.testing.network import Faults
from farcall.testing.simulation import Result

Simulate = Callable[[Faults | None, int | None], Result]  # with these faults, of that many steps

MOST_STEPS = 100


class Small(NamedTuple):
    """What is left of a failing schedule.

    Attributes:
        without: the faults that are not needed.
        steps: the length of its first part.
        result: what it comes to.
    """

    without: tuple[str, ...]
    steps: int
    result: Result


def shrink(simulate: Simulate) -> Small | None:
    """Leave out of a schedule what is not needed for its first violation.

    Args:
        simulate: runs it; equal arguments give equal results.

    Returns:
        What is left; None if the schedule has no violation.
    """
    first = simulate(None, None)
    if not first.violations:
        return None
    wanted = first.violations[0].invariant

    def shortest(faults: Faults) -> tuple[int, Result] | None:
        for steps in range(MOST_STEPS):
            result = simulate(faults, steps)
            if result.violations and result.violations[0].invariant == wanted:
                return steps, result
        return None

    faults, without = first.faults, []
    found = shortest(faults)
    assert found is not None  # the schedule itself is one of those
    for name in [field.name for field in fields(faults) if getattr(faults, field.name)]:
        fewer = but_for(faults, (name,))
        shorter = shortest(fewer)
        if shorter is not None and shorter[0] <= found[0]:
            faults, found = fewer, shorter
            without.append(name)
    return Small(tuple(without), *found)


def but_for(faults: Faults, names: tuple[str, ...]) -> Faults:
    """These faults, but for those with these names."""
    return replace(faults, **dict.fromkeys(names, 0.0))
