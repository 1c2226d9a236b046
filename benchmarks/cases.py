"""The cases, written once and run over every implementation that can do them.

Each is an iterator that makes one more call, burst or iteration for every step that is taken from
it, and gives what that took. `rpc` is a module with the names of torch.distributed.rpc, or stands
in for one. Functions that other workers run live here, and not in `peer.py`, so that all processes
know them by the same name.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import digits
import hybrid
import torch
from plans import CALLERS, LOCAL, RING, TCP_SIZES, base_of
from rnn import REAL, TINY, train, train_here
from starts import seconds_to_first_call
from steps import Step

from farcall.demos import cartpole

RNNS = {"rnn_tiny": TINY, "rnn_real": REAL}
STARTS = {"start_2": 2, "start_8": 8}

FLOATS = {"64kb": 1 << 14, "1mb": 1 << 18, "16mb": 1 << 22, "128mb": 1 << 25}
CALLS_IN_FLIGHT = 5000
CALLS_OF_A_THREAD = 100
CALLS_OF_THE_RING = 50  # of each worker
REFERENCES = 20_000
QUIET_SECONDS = 1.0
IDLE_SECONDS = 3.0


def noop() -> None:
    pass


def echo(value: Any) -> Any:
    return value


def take(value: Any) -> None:
    pass


def call_often(module: str, worker: str, count: int) -> None:
    rpc = importlib.import_module(module)
    for _ in range(count):
        rpc.rpc_sync(worker, noop)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, value: int) -> int:
        self.count += value
        return self.count


class Counted:
    """Knows how many of its kind there are in this process."""

    alive = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        with self.lock:
            Counted.alive += 1

    def __del__(self) -> None:
        with self.lock:
            Counted.alive -= 1


def alive() -> int:
    return Counted.alive


def timed(call: Callable[[], Any]) -> Iterator[float]:
    while True:
        start = time.perf_counter()
        call()
        yield time.perf_counter() - start


def timed_each(burst: Callable[[], Any], count: int) -> Iterator[float]:
    """Seconds per call of bursts of `count` calls."""
    return (seconds / count for seconds in timed(burst))


def noops(rpc: Any) -> Iterator[float]:
    return timed(lambda: rpc.rpc_sync("worker1", noop))


def with_tensor(rpc: Any, function: Callable[[Any], Any], floats: int) -> Iterator[float]:
    tensor = torch.rand(floats)
    return timed(lambda: rpc.rpc_sync("worker1", function, args=(tensor,)))


def methods(rpc: Any) -> Iterator[float]:
    counter = rpc.remote("worker1", Counter)
    return timed(lambda: counter.rpc_sync().add(1))


def in_flight(rpc: Any) -> Iterator[float]:
    def burst() -> None:
        futures = [rpc.rpc_async("worker1", noop) for _ in range(CALLS_IN_FLIGHT)]
        for future in futures:
            future.wait()

    return timed_each(burst, CALLS_IN_FLIGHT)


def from_threads(rpc: Any) -> Iterator[float]:
    def calls(_: int) -> None:
        for _ in range(CALLS_OF_A_THREAD):
            rpc.rpc_sync("worker1", noop)

    pool = ThreadPoolExecutor(CALLERS)
    return timed_each(lambda: list(pool.map(calls, range(CALLERS))), CALLERS * CALLS_OF_A_THREAD)


def references(rpc: Any) -> Iterator[float]:
    """References made and dropped, until the other side has dropped all values."""

    def burst() -> None:
        made = [rpc.remote("worker1", Counted) for _ in range(REFERENCES)]
        # The last value there is no proof of the others: handlers overtake each other.
        while rpc.rpc_sync("worker1", alive) < REFERENCES:
            pass
        made.clear()
        while rpc.rpc_sync("worker1", alive):
            pass

    return timed_each(burst, REFERENCES)


def idle(rpc: Any) -> Iterator[float]:
    """Processor time that both workers take per second, when they have been quiet for a while."""
    pids = [os.getpid(), rpc.rpc_sync("worker1", os.getpid)]
    while True:
        time.sleep(QUIET_SECONDS)
        before = sum(map(processor_seconds, pids))
        time.sleep(IDLE_SECONDS)
        yield (sum(map(processor_seconds, pids)) - before) / IDLE_SECONDS
        rpc.rpc_sync("worker1", noop)


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far: clock_getcpuclockid gives Linux's clock."""
    return time.clock_gettime(~pid << 3 | 2)


def ring(rpc: Any) -> Iterator[float]:
    """Let each worker call the next one, all at once."""

    def calls_of(rank: int) -> tuple[str, str, int]:
        return rpc.__name__, f"worker{(rank + 1) % RING}", CALLS_OF_THE_RING

    def burst() -> None:
        others = [
            rpc.rpc_async(f"worker{rank}", call_often, args=calls_of(rank))
            for rank in range(1, RING)
        ]
        call_often(*calls_of(0))
        for future in others:
            future.wait()

    return timed_each(burst, RING * CALLS_OF_THE_RING)


def cartpole_steps(rpc: Any, observers: int) -> Iterator[Step]:
    """Give each episode of the demo with the learning after it, as the time per environment step.

    The value is the number of steps, which depends on all that was learnt before.
    """
    cartpole.rpc = rpc  # the demo as it is, but for one import
    goal = cartpole.threshold()
    for seed in itertools.count():
        options = cartpole.CartpoleOptions(
            observers, seed, gamma=0.99, max_episodes=1_000_000, goal=goal
        )
        steps = 0
        start = time.perf_counter()
        agent = cartpole.CartpoleAgent(options)
        for number in range(1, observers + 1):
            agent.add_observer(f"observer{number}", number)
        for progress in agent.train():
            taken = progress.env_steps - steps
            yield Step((time.perf_counter() - start) / taken, taken)
            steps = progress.env_steps
            start = time.perf_counter()


CALLS: dict[str, Callable[[Any], Iterator[float]]] = {
    "noop": noops,
    "echo4": partial(with_tensor, function=echo, floats=4),
    "rref_method": methods,
    **{
        f"{kind}_{size}": partial(with_tensor, function=function, floats=floats)
        for kind, function in {"echo": echo, "push": take}.items()
        for size, floats in FLOATS.items()
    },
    "in_flight": in_flight,
    "threads": from_threads,
    "references": references,
    "idle": idle,
    **{
        f"{kind}_{world}": measured
        for world in ("tcp", "tcp_plain")
        for kind, measured in {
            "noop": noops,
            **{
                f"push_{size}": partial(with_tensor, function=take, floats=FLOATS[size])
                for size in TCP_SIZES
            },
        }.items()
    },
    "ring": ring,
}

CARTPOLES = {"cartpole_1": 1, "cartpole_3": 3}  # observers
TRAINING: dict[str, Callable[[str], Iterator[Step]]] = {
    "embedding": hybrid.train,
    "ddp": hybrid.train_replicated,
    "parameter_server_sync": partial(digits.train, mode="sync"),
    "parameter_server_async": partial(digits.train, mode="async"),
}


def steps_of(case: str, implementation: str, rpc: Any) -> Iterator[Step]:
    """Give a case step by step. `rpc` is None where a process is alone."""
    torch.manual_seed(0)
    base = base_of(case)
    if base in RNNS:
        if implementation == LOCAL:
            return train_here(RNNS[base])
        return train(implementation, "worker1", RNNS[base])
    if base in TRAINING:
        return TRAINING[base](implementation)
    if base in CARTPOLES:
        return cartpole_steps(rpc, CARTPOLES[base])
    if base in STARTS:
        return map(Step, seconds_to_first_call(implementation, STARTS[base]))
    return map(Step, CALLS[base](rpc))
