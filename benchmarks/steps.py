"""The result of a step of training, and whether two implementations computed the same.

Imports nothing that takes long: `run.py` only starts processes and reads their numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One number of a case: a step of training, a call, or the mean of a burst of them.

    Attributes:
        seconds: how long the step took.
        value: what the step computed, mostly its loss; None for what computes nothing.
    """

    seconds: float
    value: float | None = None


class Agreement(NamedTuple):
    """The distance by which the values of two implementations may be apart.

    Attributes:
        tolerance: relative to the larger of the two.
        in_mean: whether the mean over all steps is compared instead of each single step. It is
            where workers update parameters without waiting for each other: then no two runs of
            the same implementation compute the same.
    """

    tolerance: float
    in_mean: bool = False


def disagreement(
    agreement: Agreement, ours: Sequence[float], theirs: Sequence[float]
) -> str | None:
    """Return where two sequences of values, step by step from the first, are too far apart.

    Returns:
        A text that names the step and both values, or None if the sequences agree.
    """
    if len(ours) != len(theirs):
        return f"{len(ours)} values against {len(theirs)}"
    count = len(ours)
    if agreement.in_mean:
        ours, theirs = [statistics.fmean(ours)], [statistics.fmean(theirs)]
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True), start=1):
        if not math.isclose(our, their, rel_tol=agreement.tolerance):
            place = f"the mean of {count} steps" if agreement.in_mean else f"step {number}"
            return f"{our} against {their} in {place}"
    return None
