"""What is measured: each case, the processes it runs in, how often, and what it has to reach.

Imports nothing that takes long: `run.py` only starts processes and reads their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FARCALL, TORCH, LOCAL = "farcall", "torch", "local"
BOTH = (FARCALL, TORCH)
EVERY = (*BOTH, "ray", "rpyc", "grpc")
WITH_METHODS = (*BOTH, "ray", "rpyc")
NOT_RPYC = (*BOTH, "ray", "grpc")
DISTRIBUTIONS = {**{name: name for name in EVERY}, "grpc": "grpcio"}

CALLERS = 8  # threads
RING = 8  # workers


class World(NamedTuple):
    """The workers that cases run on: `<name>0`, which measures, `<name>1`, ..."""

    size: int
    name: str = "worker"
    tcp_only: bool = False


WORLDS = {
    "calls": World(2),
    "tcp": World(2, tcp_only=True),
    "ring": World(RING),
    "cartpole_1": World(2, name="observer"),
    "cartpole_3": World(4, name="observer"),
    "rnn_tiny": World(2),
    "rnn_real": World(2),
    "starts": World(1),  # which starts the others itself, again and again
}


class Plan(NamedTuple):
    """How often a case is measured."""

    counted: int  # calls of a block, or iterations
    dropped: int  # more of them before those: caches are cold, and timers late, after a stop
    blocks: int  # of each implementation in each round
    warm_up: int | None = None  # calls before the first block; None: as many as a block has

    @property
    def calls(self) -> int:
        """Of a block."""
        return self.dropped + self.counted


class Unit(NamedTuple):
    """What a table shows for a number of seconds."""

    name: str
    of: Callable[[float], float]


MICROSECONDS = Unit("us", lambda seconds: seconds * 1e6)
MILLISECONDS = Unit("ms", lambda seconds: seconds * 1e3)
CALLS_PER_SECOND = Unit("calls/s", lambda seconds: 1 / seconds)
STEPS_PER_SECOND = Unit("steps/s", lambda seconds: 1 / seconds)
PERCENT_OF_A_CORE = Unit("% of a core", lambda seconds_per_second: seconds_per_second * 100)


class Case(NamedTuple):
    """One line of the table."""

    world: str  # of `WORLDS`; cases of one world share its processes
    plan: Plan
    unit: Unit = MICROSECONDS
    implementations: tuple[str, ...] = BOTH  # those that can do it


SMALL = Plan(counted=200, dropped=20, blocks=10)
TENSORS = {
    "64kb": (Plan(counted=50, dropped=5, blocks=8), MICROSECONDS),
    "1mb": (Plan(counted=20, dropped=2, blocks=8), MICROSECONDS),
    "16mb": (Plan(counted=4, dropped=1, blocks=8), MILLISECONDS),
    "128mb": (Plan(counted=2, dropped=1, blocks=4), MILLISECONDS),
}

CASES = {
    "noop": Case("calls", SMALL, implementations=EVERY),
    "echo4": Case("calls", SMALL, implementations=EVERY),
    "rref_method": Case("calls", SMALL, implementations=WITH_METHODS),
    **{
        # RPyC's time grows with the square of the size: a minute for this.
        f"{kind}_{size}": Case("calls", plan, unit, NOT_RPYC if size == "128mb" else EVERY)
        for kind in ("echo", "push")
        for size, (plan, unit) in TENSORS.items()
    },
    # RPyC's client reads no answers while it sends, and so its server stops, too.
    "in_flight": Case("calls", Plan(1, 0, blocks=4), CALLS_PER_SECOND, NOT_RPYC),
    "threads": Case("calls", Plan(2, 1, blocks=6), CALLS_PER_SECOND, EVERY),
    "references": Case("calls", Plan(1, 0, blocks=2)),
    "idle": Case("calls", Plan(1, 0, blocks=1, warm_up=0), PERCENT_OF_A_CORE),
    "noop_tcp": Case("tcp", SMALL),
    "ring": Case("ring", Plan(3, 1, blocks=6)),
    # The first episodes are short.
    "cartpole_1": Case("cartpole_1", Plan(2, 1, blocks=6, warm_up=30), STEPS_PER_SECOND),
    "cartpole_3": Case("cartpole_3", Plan(1, 1, blocks=6, warm_up=20), STEPS_PER_SECOND),
    "rnn_tiny": Case("rnn_tiny", Plan(40, 12, blocks=30), MILLISECONDS, (LOCAL, *BOTH)),
    "rnn_real": Case("rnn_real", Plan(4, 1, blocks=12), MILLISECONDS, (LOCAL, *BOTH)),
    "start_2": Case("starts", Plan(1, 0, blocks=4, warm_up=0), MILLISECONDS, EVERY),
    "start_8": Case("starts", Plan(1, 0, blocks=3, warm_up=0), MILLISECONDS, EVERY),
}


# What farcall has to reach, as issue 4 puts it. A ratio is torch's time by farcall's; where there
# is a local model, what either adds to its time.
AT_LEAST = {
    "noop": 20.0,
    "echo4": 15.0,
    "rref_method": 15.0,
    "echo_128mb": 5.0,
    "push_128mb": 5.0,
    "in_flight": 6.0,
    "references": 1.0,
    "noop_tcp": 4.0,
    "ring": 2.0,
    "cartpole_1": 4.0,
    "rnn_tiny": 4.0,
    "start_2": 1.0,
    "start_8": 1.0,
}
ADDS_AT_MOST_PERCENT = {"rnn_real": 15.0}  # to the time of the same model in one process
AT_MOST = {"idle": 1.0}  # in the unit of the case


class Group(NamedTuple):
    """Cases that share processes in a round, and the implementations of each."""

    world: str
    plans: dict[str, Plan]
    implementations: dict[str, tuple[str, ...]]


def groups(cases: list[str], implementations: list[str], blocks: int | None) -> list[Group]:
    """One round of these cases, in order. `blocks` replaces the number that each case has."""
    found: dict[str, Group] = {}
    for name in cases:
        case = CASES[name]
        group = found.setdefault(case.world, Group(case.world, {}, {}))
        group.plans[name] = case.plan if blocks is None else case.plan._replace(blocks=blocks)
        group.implementations[name] = tuple(
            each for each in case.implementations if each in (*implementations, LOCAL)
        )
    return list(found.values())
