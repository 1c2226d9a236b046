"""The plan of measurements: each case, its processes, its repetitions, and its goal.

Imports nothing that takes long: `run.py` only starts processes and reads their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from steps import Agreement

FARCALL, TORCH, LOCAL = "farcall", "torch", "local"
BEFORE = "before"  # farcall as it is in another checkout
OURS = (FARCALL, BEFORE)
BOTH = (FARCALL, TORCH)
EVERY = (*BOTH, "ray", "rpyc", "grpc")
WITH_METHODS = (*BOTH, "ray", "rpyc")
NOT_RPYC = (*BOTH, "ray", "grpc")
DISTRIBUTIONS = {**{name: name for name in EVERY}, "grpc": "grpcio"}

CALLERS = 8  # threads
RING = 8  # workers
DEFAULT = "_default"  # ends the name of a case, or world, with torch's default threads


class World(NamedTuple):
    """The workers that cases run on: `<name>0`, which measures, `<name>1`, ..."""

    size: int
    name: str = "worker"
    tcp: str = ""  # no other way than TCP, "encrypted" or "plain"; torch's is plain either way
    threads: int | None = 1  # of torch, in each worker, for one operation; None: torch's default


TRAINING_WORLDS = {
    "cartpole_1": World(2, name="observer"),
    "cartpole_3": World(4, name="observer"),
    "rnn_tiny": World(2),
    "rnn_real": World(2),
    "embedding": World(2),
    "ddp": World(4),  # a master, a parameter server and two trainers
    "parameter_server": World(3),  # a parameter server and two trainers
}
WORLDS = {
    "calls": World(2),
    "tcp": World(2, tcp="encrypted"),
    "tcp_plain": World(2, tcp="plain"),
    "ring": World(RING),
    **TRAINING_WORLDS,
    **{f"{name}{DEFAULT}": world._replace(threads=None) for name, world in TRAINING_WORLDS.items()},
    "starts": World(1),  # which starts the others itself, again and again
}


class Plan(NamedTuple):
    """The repetitions of a case."""

    counted: int  # calls of a block, or iterations
    dropped: int  # more of them before those: caches are cold, and timers late, after a stop
    blocks: int  # of each implementation in each round
    warm_up: int | None = None  # calls before the first block; None: as many as a block has

    @property
    def calls(self) -> int:
        """Of a block."""
        return self.dropped + self.counted


class Unit(NamedTuple):
    """The form in which a table shows a number of seconds."""

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
    agreement: Agreement | None = None  # of what farcall and torch compute


SMALL = Plan(counted=200, dropped=20, blocks=10)
TENSORS = {
    "64kb": (Plan(counted=50, dropped=5, blocks=8), MICROSECONDS),
    "1mb": (Plan(counted=20, dropped=2, blocks=8), MICROSECONDS),
    "16mb": (Plan(counted=4, dropped=1, blocks=8), MILLISECONDS),
    "128mb": (Plan(counted=2, dropped=1, blocks=4), MILLISECONDS),
}

TCP_SIZES = ("1mb", "128mb")

# Both do the same operations in the same order, on equal numbers.
EQUAL = Agreement(1e-4)
# Two trainers change the same parameters as they like.
CLOSE = Agreement(0.25, in_mean=True)
WITH_LOCAL = (LOCAL, *BOTH)

# By case: with one thread, and how it is planned with torch's default.
TRAINING: dict[str, tuple[Case, Plan]] = {
    # The first episodes are short.
    "cartpole_1": (
        Case("cartpole_1", Plan(2, 1, blocks=6, warm_up=30), STEPS_PER_SECOND, BOTH, EQUAL),
        Plan(2, 1, blocks=6, warm_up=30),
    ),
    "cartpole_3": (
        Case("cartpole_3", Plan(1, 1, blocks=6, warm_up=20), STEPS_PER_SECOND, BOTH, EQUAL),
        Plan(1, 1, blocks=4, warm_up=15),
    ),
    "rnn_tiny": (
        Case("rnn_tiny", Plan(40, 12, blocks=30), MILLISECONDS, WITH_LOCAL, EQUAL),
        Plan(40, 12, blocks=20),
    ),
    "rnn_real": (
        Case("rnn_real", Plan(4, 1, blocks=12), MILLISECONDS, WITH_LOCAL, EQUAL),
        Plan(4, 1, blocks=5),
    ),
    "embedding": (
        Case("embedding", Plan(40, 12, blocks=20), MILLISECONDS, BOTH, EQUAL),
        Plan(40, 12, blocks=12),
    ),
    "ddp": (
        Case("ddp", Plan(10, 2, blocks=10), MILLISECONDS, BOTH, CLOSE),
        Plan(10, 2, blocks=10),
    ),
    **{
        f"parameter_server_{mode}": (
            Case("parameter_server", Plan(3, 1, blocks=8), MILLISECONDS, BOTH, agreement),
            Plan(4, 1, blocks=8),
        )
        for mode, agreement in {"sync": EQUAL, "async": CLOSE}.items()
    },
}


def with_default_threads(cases: dict[str, tuple[Case, Plan]]) -> dict[str, Case]:
    """Return each case with one thread, and after it with torch's default number of threads."""
    found: dict[str, Case] = {}
    for name, (case, plan) in cases.items():
        found[name] = case
        found[f"{name}{DEFAULT}"] = case._replace(world=f"{case.world}{DEFAULT}", plan=plan)
    return found


def base_of(case: str) -> str:
    """Return the name of a case without what it says about threads."""
    return case.removesuffix(DEFAULT)


TRAINING_CASES = with_default_threads(TRAINING)
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
    **{
        f"{case}_{world}": Case(world, *plan_and_unit)
        for world in ("tcp", "tcp_plain")
        for case, plan_and_unit in {
            "noop": (SMALL, MICROSECONDS),
            **{f"push_{size}": TENSORS[size] for size in TCP_SIZES},
        }.items()
    },
    "ring": Case("ring", Plan(3, 1, blocks=6)),
    **TRAINING_CASES,
    "start_2": Case("starts", Plan(1, 0, blocks=4, warm_up=0), MILLISECONDS, EVERY),
    "start_8": Case("starts", Plan(1, 0, blocks=3, warm_up=0), MILLISECONDS, EVERY),
}
SETS = {"training": list(TRAINING_CASES)}  # names for several cases


# The goals of farcall, as issue 4 puts them. A ratio is torch's time by farcall's; where there
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
    "noop_tcp_plain": 4.0,
    "ring": 2.0,
    "cartpole_1": 4.0,
    "rnn_tiny": 4.0,
    "start_2": 1.0,
    "start_8": 1.0,
}
# As issue 23 puts it: torch's time by farcall's, whatever one process takes.
PER_STEP_AT_LEAST = {
    name: 1.0 if name == f"rnn_real{DEFAULT}" else 1.5
    for name in TRAINING_CASES
    if name.endswith(DEFAULT)
}
ADDS_AT_MOST_PERCENT = {"rnn_real": 15.0}  # to the time of the same model in one process
AT_MOST = {"idle": 1.0}  # in the unit of the case


class Group(NamedTuple):
    """Cases that share processes in a round, and the implementations of each."""

    world: str
    plans: dict[str, Plan]
    implementations: dict[str, tuple[str, ...]]

    def begun_by_another(self, turn: int) -> Group:
        """Return the group for round number `turn`: another implementation starts first in each.

        The order of the starts decides some cases: of two equal checkouts the one that starts first
        is faster by a fifth in `echo_16mb`.
        """
        return self._replace(
            implementations={
                case: names[turn % len(names) :] + names[: turn % len(names)]
                for case, names in self.implementations.items()
            }
        )


def groups(cases: list[str], implementations: list[str], blocks: int | None) -> list[Group]:
    """Return one round of these cases, in order. `blocks` replaces the number of each case."""
    found: dict[str, Group] = {}
    for name in cases:
        case = CASES[name]
        group = found.setdefault(case.world, Group(case.world, {}, {}))
        group.plans[name] = case.plan if blocks is None else case.plan._replace(blocks=blocks)
        group.implementations[name] = tuple(
            each
            for own in case.implementations
            for each in (OURS if own == FARCALL else (own,))
            if each in (*implementations, LOCAL)
        )
    return list(found.values())
