"""Millions of calls between three workers: in the second half they need no more memory than before.

Resident memory is `Rss` of smaps_rollup, which is counted from the page tables at that moment;
the counters in /proc/PID/status lag behind by some hundred kilobytes. It is taken between rounds,
when nothing is in flight, after a garbage collection, and after malloc has given back the pages
that it keeps without using them: which of those it keeps is chance. The growth is the median of the
last samples in comparison with the median of those about the middle.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from calls import CALLS, WITH_REFERENCE, Load, drain
from crew import Crew, Member, assembled, leave_all
from report import Report, Settings

WORKERS = 3
ROUNDS = 100
MIDDLE = 10  # samples about the middle, and as many at the end
ALLOWED = 0.01  # growth in the second half
TIMEOUT = 300.0  # seconds, of each call

# What a worker does beside references and passes; most of the calls are in batches.
PLAIN = ["many"] * 30 + [kind for kind in CALLS if kind not in (*WITH_REFERENCE, "many")]

_loads: list[Load] = []
_libc = ctypes.CDLL(None)


class Amount(NamedTuple):
    calls: int = 0
    references: int = 0
    passes: int = 0


def prepare(others: list[str], seed: int) -> None:
    def make(kind: str, function: Callable[[], Any]) -> Any:
        return function()

    _loads.append(Load(others, seed, make, TIMEOUT))


def call(wanted: Amount) -> Amount:
    """Make so many calls or some more, of all kinds in any order; how many."""
    load = _loads[0]
    kinds = ["backward"] * wanted.passes
    references = [kind for kind in WITH_REFERENCE if kind != "backward"]
    kinds += load.random.choices(references, k=max(0, wanted.references - wanted.passes))
    calls = sum(CALLS[kind] for kind in kinds)
    while calls < wanted.calls:
        kinds.append(load.random.choice(PLAIN))
        calls += CALLS[kinds[-1]]
    load.random.shuffle(kinds)
    for kind in kinds:
        load.make(kind)
    return Amount(calls, max(wanted.references, wanted.passes), wanted.passes)


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


def growth(samples: list[int]) -> float:
    """By which part of itself the last half has grown."""
    few = max(1, MIDDLE * len(samples) // ROUNDS)
    middle = (len(samples) - few) // 2
    before = statistics.median(samples[middle : middle + few])
    return statistics.median(samples[-few:]) / before - 1


def shares(total: int) -> list[int]:
    """For each round, a worker's part of what all make."""
    whole = -(-total // WORKERS)
    return [whole * (n + 1) // ROUNDS - whole * n // ROUNDS for n in range(ROUNDS)]


def on_all(members: list[Member], step: Callable[..., Any], *args: Any) -> list[Any]:
    for member in members:
        member.start(step, *args)
    return [member.result() for member in members]


def soak(crew: Crew, settings: Settings, report: Report) -> tuple[Amount, list[list[Memory]], Any]:
    """What was done, the samples of each worker, and what is held at the end."""
    members = crew.group(WORKERS)
    names = [member.name for member in members]
    for number, member in enumerate(members):
        others = [name for name in names if name != member.name]
        member.run(prepare, others, settings.seed * WORKERS + number)
    done, samples = Amount(), []
    began = time.monotonic()
    rounds = zip(*map(shares, (settings.calls, settings.references, settings.passes)), strict=True)
    for number, amounts in enumerate(rounds):
        made = on_all(members, call, Amount(*amounts))
        done = Amount(*map(sum, zip(done, *made, strict=True)))
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
        resident = [sample.resident for sample in one]
        grown = growth(resident)
        report.demand(f"memory of w{number} grows by less than {ALLOWED:.0%} in the second half",
                      f"{grown:+.2%} to {resident[-1]} kB; "
                      f"anonymous {growth([sample.anonymous for sample in one]):+.2%}",
                      grown < ALLOWED)  # fmt: skip
