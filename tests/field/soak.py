"""Millions of calls between three workers: in the second half they need no more memory than before.

The trial judges the growth of anonymous memory as a part of all resident memory. A worker keeps
some buffers of shared memory for seconds, which alone makes resident memory come and go by 1 %.
Both are read from smaps_rollup, which counts the page tables at that moment; the counters in
/proc/PID/status lag behind by some hundred kilobytes. A sample is taken between rounds, when
nothing is in flight, after a garbage collection, and after malloc has given back the pages that it
keeps without using them: which of those it keeps is chance. There are no huge pages, since one of
them is 1 % of a worker's memory. The growth leads from the median of the samples about the middle
to the median of the last samples.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from calls import AMOUNTS, Amount, Load, drain
from crew import Crew, Member, assembled, leave_all
from report import Report, Settings

WORKERS = 3
ROUNDS = range(20, 101)  # a sample takes as long as some thousand calls
CALLS_OF_A_ROUND = 20_000  # of all workers together
MIDDLE = 0.1  # of the samples are about the middle, and as many at the end
ALLOWED = 0.01  # growth in the second half
TIMEOUT = 300.0  # seconds, of each call
PR_SET_THP_DISABLE = 41  # of <sys/prctl.h>

# The work for the sake of passes, of references, and of calls. Most are in batches.
PASSES = ["layer"] * 9 + ["backward"]
REFERENCES = ["references"] * 10 + ["reference", "lent", "given"]
CALLS = ["many"] * 30 + ["echo", "tensor", "nested", "fails", "cancelled"]

_loads: list[Load] = []
_libc = ctypes.CDLL(None)


def prepare(others: list[str], seed: int) -> None:
    def make(kind: str, function: Callable[[], Any]) -> Any:
        return function()

    _loads.append(Load(others, seed, make, TIMEOUT))
    _libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def call(wanted: Amount) -> Amount:
    """Make so many calls or a few more, of all kinds in any order; how many."""
    load = _loads[0]
    kinds, done = [], Amount()
    for number, choice in ((2, PASSES), (1, REFERENCES), (0, CALLS)):
        while done[number] < wanted[number]:
            kinds.append(load.random.choice(choice))
            done = added(done, AMOUNTS[kinds[-1]])
    load.random.shuffle(kinds)
    for kind in kinds:
        load.make(kind)
    return done


def added(*amounts: Amount) -> Amount:
    return Amount(*map(sum, zip(*amounts, strict=True)))


class Memory(NamedTuple):
    """In kilobytes."""

    resident: int
    anonymous: int


def memory() -> Memory:
    gc.collect()
    _libc.malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return Memory(sizes["Rss"], sizes["Anonymous"])


def growth(samples: list[Memory]) -> float:
    """Return the anonymous memory that came in the last half, as a part of all resident memory."""
    few = int(MIDDLE * len(samples))
    middle = (len(samples) - few) // 2
    before, after = samples[middle : middle + few], samples[-few:]
    came = statistics.median(one.anonymous for one in after) - statistics.median(
        one.anonymous for one in before
    )
    return came / statistics.median(one.resident for one in before)


def shares(total: int, rounds: int) -> list[int]:
    """Return, for each round, a worker's part of the calls that all make."""
    whole = -(-total // WORKERS)
    return [whole * (n + 1) // rounds - whole * n // rounds for n in range(rounds)]


def on_all(members: list[Member], step: Callable[..., Any], *args: Any) -> list[Any]:
    for member in members:
        member.start(step, *args)
    return [member.result() for member in members]


def soak(crew: Crew, settings: Settings, report: Report) -> tuple[Amount, list[list[Memory]], Any]:
    """Return the work done, the samples of each worker, and the things held at the end."""
    members = crew.group(WORKERS)
    names = [member.name for member in members]
    for number, member in enumerate(members):
        others = [name for name in names if name != member.name]
        member.run(prepare, others, settings.seed * WORKERS + number)
    done, samples = Amount(), []
    began = time.monotonic()
    rounds = max(ROUNDS[0], min(ROUNDS[-1], settings.calls // CALLS_OF_A_ROUND))
    wanted = (settings.calls, settings.references, settings.passes)
    for number, amounts in enumerate(
        zip(*(shares(total, rounds) for total in wanted), strict=True)
    ):
        made = on_all(members, call, Amount(*amounts))
        done = added(done, *made)
        held = on_all(members, drain)
        samples.append(on_all(members, memory))
        if number % 10 == 9:
            resident = [sample.resident for sample in samples[-1]]
            report.note(f"{done} after {time.monotonic() - began:.0f} s, resident {resident} kB")
    leave_all(*members)
    return done, [list(one) for one in zip(*samples, strict=True)], held


def trial(report: Report, settings: Settings) -> None:
    with assembled(f"{settings.folder}/soak") as crew:
        done, samples, held = soak(crew, settings, report)
    report.demand("results and gradients are right", f"{done}", True)
    report.demand("no reference, value, running call, context or pass is left", held, not any(held))
    for number, one in enumerate(samples):
        grown = growth(one)
        report.demand(f"memory of w{number} grows by less than {ALLOWED:.0%} in the second half",
                      f"{grown:+.2%} to {one[-1].resident} kB, of which {one[-1].anonymous} kB "
                      "are anonymous", grown < ALLOWED)  # fmt: skip
