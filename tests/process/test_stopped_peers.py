"""A worker is stopped: only callers that need its answer wait for it, and it loses nothing."""

from __future__ import annotations

import gc
import operator
import signal
from typing import Any

import pytest
import torch
from crew import Crew, call, leave_all

from farcall import rpc

_kept: dict[str, Any] = {}


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def make(to: str) -> int:
    """Make a link, and a reference to drop."""
    _kept["old"] = rpc.remote(to, Counter)
    count: int = _kept["old"].rpc_sync().add(1)
    return count


def send(to: str) -> bool:
    """Return whether all of it is still going on. Without timeouts: what waited would never end."""
    value = rpc.rpc_async(to, operator.add, args=(1, 2), timeout=0)
    many = [rpc.rpc_async(to, len, args=(bytes(100_000),), timeout=0) for _ in range(100)]
    made = rpc.remote(to, Counter, timeout=0)
    method = made.rpc_async(timeout=0).add(5)
    _kept.update(value=value, many=many, made=made, method=method)
    _kept.pop("old", None)
    gc.collect()
    return not (value.done() or method.done())


def time_out(to: str) -> list[str]:
    errors = []
    for way in (rpc.rpc_sync, rpc.rpc_async):
        try:
            answer = way(to, operator.add, args=(1, 2), timeout=0.2)
            errors.append(f"no error but {answer.wait()}")
        except rpc.RpcTimeout as error:
            errors.append(type(error).__name__)
    return errors


def finish() -> tuple[int, set[int], int, int]:
    sizes = {future.wait() for future in _kept["many"]}
    return _kept["value"].wait(), sizes, _kept["method"].wait(), _kept["made"].rpc_sync().add(1)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("transport", ["native", "socket"])
def test_a_stopped_worker_is_not_waited_for_and_goes_on(
    crew: Crew, linked: bool, transport: str
) -> None:
    caller, callee = crew.group(2, transports=(transport,))
    if linked:
        assert caller.run(make, "w1") == 1
    callee.stop()
    assert caller.run(send, "w1")
    assert caller.run(time_out, "w1") == ["RpcTimeout", "RpcTimeout"]
    callee.signal(signal.SIGCONT)
    assert caller.run(finish) == (3, {100_000}, 5, 6)
    assert callee.run(call, "w0", operator.add, 1, 1) == 2
    leave_all(caller, callee)


SIZE = 4 << 20  # bytes
COUNT = 60


def large() -> torch.Tensor:
    return torch.ones(SIZE // 4)


def ask_for_much(to: str) -> None:
    _kept["answers"] = [rpc.rpc_async(to, large, timeout=0) for _ in range(COUNT)]


def sums() -> set[float]:
    return {float(future.wait().sum()) for future in _kept.pop("answers")}


def add_again_and_again(to: str) -> set[int]:
    """Call without timeouts: it would never end if a thread of that worker waited for another."""
    return {rpc.rpc_sync(to, operator.add, args=(1, 2), timeout=0) for _ in range(100)}


@pytest.mark.parametrize("transport", ["native", "socket"])
def test_a_stopped_caller_costs_its_callee_no_thread(crew: Crew, transport: str) -> None:
    stopped, callee, other = crew.group(
        3, transports=(transport,), num_worker_threads=2, max_in_flight_bytes=4 * SIZE
    )
    stopped.run(ask_for_much, "w1")
    stopped.stop()
    assert other.run(add_again_and_again, "w1") == {3}
    stopped.signal(signal.SIGCONT)
    assert stopped.run(sums) == {float(SIZE // 4)}
    leave_all(stopped, callee, other)
