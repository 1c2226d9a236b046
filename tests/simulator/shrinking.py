"""A failing schedule made small: fewer inputs, and still the same promise broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.schedule import Result, Script

ROUNDS = 3  # in which one input after the other is left out


def shrink(simulate: Callable[[Script], Result]) -> Result:
    """Leave out of a schedule the inputs that are not needed for its first violation.

    An input may be needed for now, and not once others are left out: so each is tried some times.

    Args:
        simulate: runs the schedule by a script.

    Returns:
        The rest, which is not longer; the schedule itself if nothing is wrong in it.
    """
    script = Script(frozenset(), {})
    best = simulate(script)
    broken = _broken_in(best)
    for size in _sizes(best.inputs) if broken else ():
        for last in range(best.inputs, 0, -size):
            fewer = script.left_out.union(range(max(1, last - size + 1), last + 1))
            if last - size >= best.inputs or fewer == script.left_out:
                continue
            attempt = script._replace(left_out=fewer)
            result = simulate(attempt)
            if _broken_in(result) == broken and result.events <= best.events:
                best, script = result, attempt
    return best


def _broken_in(result: Result) -> str | None:
    return result.violations[0].invariant if result.violations else None


def _sizes(size: int) -> Iterator[int]:
    """Return how many inputs are left out at once: fewer and fewer, in the end one."""
    while size > 1:
        yield size
        size //= 2
    yield from (1,) * ROUNDS
