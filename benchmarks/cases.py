"""The cases, written once and run over either implementation.

Each is an iterator that makes one more call, or one more iteration, for every number that is taken
from it, and gives the seconds that took. Functions that the other side runs live here, and not in
`peer.py`, so that both sides know them by the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rnn import REAL, TINY, train, train_here

LOCAL = "local"
TRAINING = {"rnn_tiny": TINY, "rnn_real": REAL}


def noop() -> None:
    pass


def echo(value: Any) -> Any:
    return value


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, value: int) -> int:
        self.count += value
        return self.count


def timed(call: Callable[[], Any]) -> Iterator[float]:
    while True:
        start = time.perf_counter()
        call()
        yield time.perf_counter() - start


def timed_echo(rpc: Any, floats: int) -> Iterator[float]:
    tensor = torch.rand(floats)
    return timed(lambda: rpc.rpc_sync("worker1", echo, args=(tensor,)))


def case_noop(rpc: Any) -> Iterator[float]:
    return timed(lambda: rpc.rpc_sync("worker1", noop))


def case_echo4(rpc: Any) -> Iterator[float]:
    return timed_echo(rpc, 4)


def case_rref_method(rpc: Any) -> Iterator[float]:
    counter = rpc.remote("worker1", Counter)
    return timed(lambda: counter.rpc_sync().add(1))


def case_echo_1mb(rpc: Any) -> Iterator[float]:
    return timed_echo(rpc, 1 << 18)


def case_echo_16mb(rpc: Any) -> Iterator[float]:
    return timed_echo(rpc, 1 << 22)


def case_in_flight(rpc: Any) -> Iterator[float]:
    """5,000 asynchronous calls at once; seconds per call."""
    count = 5000

    def burst() -> None:
        torch.futures.wait_all([rpc.rpc_async("worker1", noop) for _ in range(count)])

    return (seconds / count for seconds in timed(burst))


def case_references(rpc: Any) -> Iterator[float]:
    """2,000 references made, confirmed and dropped; seconds per reference."""
    count = 2000

    def burst() -> None:
        made = [rpc.remote("worker1", noop) for _ in range(count)]
        made[-1].to_here()

    return (seconds / count for seconds in timed(burst))


CALLS: dict[str, Callable[[Any], Iterator[float]]] = {
    name[5:]: function for name, function in list(globals().items()) if name[:5] == "case_"
}


def seconds_of(case: str, implementation: str, rpc: Any) -> Iterator[float]:
    """Seconds per call of a case, or per iteration of a training case. `local` has only those."""
    if case not in TRAINING:
        return CALLS[case](rpc)
    torch.manual_seed(0)
    if implementation == LOCAL:
        return train_here(TRAINING[case])
    return train(implementation, "worker1", TRAINING[case])
