"""A worker that has nothing to do costs nothing."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from crew import Crew, call, leave_all

IDLE_SECONDS = 3.0
MAX_SLEEPS = 300  # the watchdog looks 50 times before it sleeps, and other clocks run out once

needs_native = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)


def ticks_of_threads() -> dict[str, int]:
    """Processor time of every thread of this process, in clock ticks."""
    ticks = {}
    for stat in of_threads("stat"):
        name, _, rest = stat.rpartition(")")
        fields = rest.split()
        ticks[name] = int(fields[11]) + int(fields[12])
    return ticks


def of_threads(file: str) -> Iterator[str]:
    """Read a file of every thread of this process; those that end meanwhile have none."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield (task / file).read_text()


def rest() -> tuple[float, int, dict[str, int]]:
    """Do nothing for a while: seconds of processor time that it took, how often a thread slept,
    and ticks by thread.
    """
    before, before_threads, before_sleeps = os.times(), ticks_of_threads(), sleeps()
    threading.Event().wait(IDLE_SECONDS)
    after, after_threads, slept = os.times(), ticks_of_threads(), sleeps() - before_sleeps
    spent = after.user + after.system - before.user - before.system
    return spent, slept, {n: t - before_threads.get(n, 0) for n, t in after_threads.items()}


def sleeps() -> int:
    """Return the number of times that threads of this process went to sleep so far."""
    lines = (line for status in of_threads("status") for line in status.splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


@pytest.mark.parametrize("transport", ["socket", pytest.param("native", marks=needs_native)])
def test_idle_pair_uses_no_processor(crew: Crew, transport: str) -> None:
    first, second = crew.group(2, transports=[transport])
    for one, other in ((first, "w1"), (second, "w0")):
        for _ in range(20):
            one.run(call, other, operator.add, 1, 2)
            one.run(call, other, torch.neg, torch.ones(100_000))
    first.start(rest)
    second.start(rest)
    for member in (first, second):
        spent, slept, ticks = member.result()
        share = f"{spent / IDLE_SECONDS:.2%} of a core"
        print(f"\n{member.name} spent {share} in idleness and slept {slept} times: {ticks}")
        assert slept < MAX_SLEEPS
        assert spent < 0.05 * IDLE_SECONDS
        assert max(ticks.values()) < 0.05 * IDLE_SECONDS * os.sysconf("SC_CLK_TCK")
    leave_all(first, second)
