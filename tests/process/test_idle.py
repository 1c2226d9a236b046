"""A worker that has nothing to do costs nothing."""

from __future__ import annotations

import operator
import os
import threading
from pathlib import Path

from crew import Crew, call, leave_all

IDLE_SECONDS = 3.0


def ticks_of_threads() -> dict[str, int]:
    """Processor time of every thread of this process, in clock ticks."""
    ticks = {}
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().rpartition(")")
        fields = rest.split()
        ticks[f"{task.name} {name.partition('(')[2]}"] = int(fields[11]) + int(fields[12])
    return ticks


def rest() -> tuple[float, dict[str, int]]:
    """Do nothing for a while: seconds of processor time that it took, and ticks by thread."""
    before, before_threads = os.times(), ticks_of_threads()
    threading.Event().wait(IDLE_SECONDS)
    after, after_threads = os.times(), ticks_of_threads()
    spent = after.user + after.system - before.user - before.system
    return spent, {n: t - before_threads.get(n, 0) for n, t in after_threads.items()}


def test_idle_pair_uses_no_processor(crew: Crew) -> None:
    first, second = crew.group(2)
    for one, other in ((first, "w1"), (second, "w0")):
        for _ in range(20):
            one.run(call, other, operator.add, 1, 2)
    first.start(rest)
    second.start(rest)
    for member in (first, second):
        spent, ticks = member.result()
        print(f"\n{member.name} spent {spent / IDLE_SECONDS:.2%} of a core in idleness: {ticks}")
        assert spent < 0.05 * IDLE_SECONDS
        assert max(ticks.values()) < 0.05 * IDLE_SECONDS * os.sysconf("SC_CLK_TCK")
    leave_all(first, second)
