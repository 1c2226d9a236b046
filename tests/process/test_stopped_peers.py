"""A worker is stopped: nobody waits for it but who waits for an answer, and it loses nothing."""

from __future__ import annotations

import gc
import operator
import signal
from typing import Any

import pytest
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
    """With a link, and a reference to drop."""
    _kept["old"] = rpc.remote(to, Counter)
    count: int = _kept["old"].rpc_sync().add(1)
    return count


def send(to: str) -> bool:
    """Whether all of it is still going on. Without timeouts: what waited would never end."""
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
