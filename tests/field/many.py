"""A hundred local workers that all call all others at once, three times."""

from __future__ import annotations

import operator
import time

from crew import assembled, leave_all
from report import Report, Settings
from steps import listen, losses

from farcall import rpc

ROUNDS = 3
TIMEOUT = 120.0  # seconds: it only counts that no worker is taken for dead


def call_all(me: int, count: int, at: float) -> tuple[int, list[str]]:
    """Return how many calls gave their value, and how the others ended."""
    time.sleep(max(0.0, at - time.monotonic()))
    futures = [
        rpc.rpc_async(f"w{other}", operator.add, args=(other, me), timeout=TIMEOUT)
        for other in range(count)
        if other != me
    ]
    right, errors = 0, []
    for other, future in zip((n for n in range(count) if n != me), futures, strict=True):
        try:
            right += future.wait() == other + me
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:120])
    return right, errors


def trial(report: Report, settings: Settings) -> None:
    count = settings.workers
    for turn in range(ROUNDS):
        with assembled(f"{settings.folder}/many{turn}") as crew:
            members = crew.group(count)
            for member in members:
                member.run(listen)
            at = time.monotonic() + 1.0
            for me, member in enumerate(members):
                member.start(call_all, me, count, at)
            results = [member.result() for member in members]
            took = time.monotonic() - at
            dead = [loss for member in members for loss in member.run(losses)]
            leave_all(*members)
        right = sum(number for number, _ in results)
        errors = [error for _, found in results for error in found]
        report.demand(
            f"{count} workers all-to-all from nothing, no worker dead",
            f"{right} of {count * (count - 1)} values in {took:.1f} s, "
            f"{len(dead)} losses {dead[:2]}, errors {errors[:2]}",
            right == count * (count - 1) and not dead,
        )
