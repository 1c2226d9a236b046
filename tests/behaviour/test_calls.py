"""Calls: every target, every way to name a worker, and many calls at once."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import (
    PATIENCE,
    WAYS,
    Box,
    Gate,
    by_sync,
    echo,
    in_threads,
    wait_at,
    worker_name,
)
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)


def collect(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def nothing() -> None:
    return None


@torch.jit.script
def scripted(value: torch.Tensor, factor: int) -> torch.Tensor:
    return value * factor


class Counter:
    kind = "counter"

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def name(cls) -> str:
        return cls.kind

    def __call__(self, number: int) -> int:
        return self.count + number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.count == self.count

    __hash__ = None  # type: ignore[assignment]


class SubCounter(Counter):
    kind = "sub"


def closure_over(number: int) -> Callable[[int], int]:
    def add(other: int) -> int:
        return number + other

    return add


TARGETS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "function": (echo, (5,), 5),
    "builtin": (len, ("four",), 4),
    "operator": (operator.add, (1, 2), 3),
    "operator of torch": (torch.add, (torch.tensor(1), torch.tensor(2)), torch.tensor(3)),
    "method of Tensor": (torch.Tensor.add, (torch.tensor(1), 2), torch.tensor(3)),
    "torch.ops": (torch.ops.aten.add.Tensor, (torch.tensor(1), 2), torch.tensor(3)),
    "functional": (torch.nn.functional.relu, (torch.tensor(-1.0),), torch.tensor(0.0)),
    "constructor": (Counter, (3,), Counter(3)),
    "constructor of the library": (dict, ([("a", 1)],), {"a": 1}),
    "bound method": (Counter(3).add, (4,), 7),
    "static method": (Counter.double, (4,), 8),
    "class method": (Counter.name, (), "counter"),
    "inherited class method": (SubCounter.name, (), "sub"),
    "unbound method": (Counter.add, (Counter(1), 2), 3),
    "callable object": (Counter(3), (4,), 7),
    "TorchScript function": (scripted, (torch.tensor(2), 3), torch.tensor(6)),
    "lambda": (lambda x: x + 1, (1,), 2),
    "closure": (closure_over(10), (1,), 11),
    "partial": (functools.partial(operator.add, 5), (1,), 6),
    "partial of a lambda": (functools.partial(lambda x, y: x - y, 5), (1,), 4),
}


@each_way
def test_every_kind_of_target_can_be_called(pair: list[Agent], call: Way) -> None:
    for target, (function, args, expected) in TARGETS.items():
        assert call("w1", function, args) == expected, target


@each_way
def test_arguments_arrive_in_their_places(pair: list[Agent], call: Way) -> None:
    assert call("w1", collect, (1, "two"), kwargs={"three": [3]}) == ((1, "two"), {"three": [3]})
    assert call("w1", collect) == ((), {})
    assert call("w1", collect, kwargs={"function": 1, "to": 2, "timeout": 3, "self": 4}) == (
        (),
        {"function": 1, "to": 2, "timeout": 3, "self": 4},
    )
    assert call("w1", nothing) is None


def test_arguments_may_be_a_list_or_none(pair: list[Agent]) -> None:
    assert rpc.rpc_sync("w1", collect, args=[1, 2]) == ((1, 2), {})
    assert rpc.rpc_sync("w1", collect, args=None, kwargs=None) == ((), {})


@each_way
@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1)])
def test_a_worker_goes_by_name_id_or_info(pair: list[Agent], call: Way, to: Any) -> None:
    assert call(to, worker_name) == "w1"


@each_way
def test_a_worker_can_call_itself(pair: list[Agent], call: Way) -> None:
    for to in ("w0", 0, rpc.get_worker_info()):
        assert call(to, worker_name) == "w0"
    assert call("w0", lambda: echo(4)) == 4


@each_way
def test_a_call_to_oneself_shares_no_objects(pair: list[Agent], call: Way) -> None:
    given = [1, 2]
    tensor = torch.zeros(10_000)
    returned, returned_tensor = call("w0", echo, ((given, tensor),))
    assert returned == given
    assert returned is not given
    tensor.fill_(1)
    assert not returned_tensor.any()


@each_way
def test_sensible_timeouts_are_taken(pair: list[Agent], call: Way) -> None:
    for timeout in (60, 60.5, 0, 0.0, rpc.UNSET_RPC_TIMEOUT):
        assert call("w1", echo, (1,), timeout=timeout) == 1, timeout


def test_all_workers_reach_all_others(start: Callable[..., list[Agent]]) -> None:
    agents = start(4)
    for agent in agents:
        with acting_as(agent):
            assert [rpc.rpc_sync(to, worker_name) for to in range(4)] == ["w0", "w1", "w2", "w3"]


def test_get_worker_info_knows_all_workers(pair: list[Agent]) -> None:
    assert rpc.get_worker_info() == rpc.WorkerInfo("w0", 0)
    info = rpc.get_worker_info("w1")
    assert (info.name, info.id) == ("w1", 1)
    assert rpc.get_worker_info(1) == rpc.get_worker_info(info) == info
    assert rpc.rpc_sync("w1", rpc.get_worker_info) == info


def test_big_arguments_and_results_arrive_whole(pair: list[Agent]) -> None:
    text = b"0123456789abcdef" * (1 << 19)
    assert rpc.rpc_sync("w1", echo, args=(text,)) == text


# Many calls at once.


def test_a_thousand_calls_in_flight_all_end(start: Callable[..., list[Agent]], gate: Gate) -> None:
    start(2, num_worker_threads=4)
    futures = [rpc.rpc_async("w1", wait_at, args=(gate, i)) for i in range(1000)]
    gate.open()
    assert torch.futures.wait_all(futures) == list(range(1000))
    assert gate.arrived == 1000


def test_a_thousand_calls_to_oneself_in_flight_all_end(pair: list[Agent], gate: Gate) -> None:
    futures = [rpc.rpc_async("w0", wait_at, args=(gate, i)) for i in range(1000)]
    gate.open()
    assert torch.futures.wait_all(futures) == list(range(1000))


def test_threads_may_call_at_once(pair: list[Agent]) -> None:
    together = threading.Barrier(8)

    def calls(base: int) -> list[int]:
        with acting_as(pair[0]):
            together.wait(PATIENCE)
            values = [rpc.rpc_sync("w1", echo, args=(base + i,)) for i in range(50)]
            futures = [rpc.rpc_async("w1", echo, args=(base + i,)) for i in range(50)]
            return values + [future.wait() for future in futures]

    with in_threads(*(functools.partial(calls, 1000 * n) for n in range(8))) as results:
        pass
    for number, result in enumerate(results):
        expected = list(range(1000 * number, 1000 * number + 50))
        assert result == expected + expected


def test_threads_of_all_workers_may_call_each_other_at_once(trio: list[Agent]) -> None:
    together = threading.Barrier(6)

    def calls(agent: Agent) -> list[str]:
        with acting_as(agent):
            together.wait(PATIENCE)
            return [rpc.rpc_sync(i % 3, worker_name) for i in range(60)]

    with in_threads(*(functools.partial(calls, agent) for agent in trio * 2)) as results:
        pass
    assert results == [["w0", "w1", "w2"] * 20] * 6


def test_small_and_huge_calls_mix(pair: list[Agent]) -> None:
    huge = torch.arange(2_000_000)
    big = [rpc.rpc_async("w1", echo, args=(huge + n,)) for n in range(3)]
    small = [rpc.rpc_async("w1", echo, args=(i,)) for i in range(200)]
    between = [rpc.rpc_sync("w1", echo, args=(i,)) for i in range(50)]
    assert between == list(range(50))
    assert torch.futures.wait_all(small) == list(range(200))
    for number, future in enumerate(big):
        assert torch.equal(future.wait(), huge + number)


def test_huge_calls_in_both_directions_at_once_do_not_block_each_other(pair: list[Agent]) -> None:
    huge = torch.arange(1_000_000)
    together = threading.Barrier(4)

    def exchange(agent: Agent, to: str) -> bool:
        with acting_as(agent):
            together.wait(PATIENCE)
            return all(torch.equal(rpc.rpc_sync(to, echo, args=(huge,)), huge) for _ in range(3))

    to_w1 = functools.partial(exchange, pair[0], "w1")
    to_w0 = functools.partial(exchange, pair[1], "w0")
    with in_threads(to_w1, to_w0, to_w1, to_w0) as results:
        pass
    assert results == [True] * 4


def test_calls_of_one_thread_start_in_order(start: Callable[..., list[Agent]]) -> None:
    start(2, num_worker_threads=1)
    box = Box()
    futures = [rpc.rpc_async("w1", box.put, args=(i,)) for i in range(100)]
    torch.futures.wait_all(futures)
    assert box.things == list(range(100))


def test_a_function_replaced_on_the_callee_is_seen(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "test_calls_changing"
    monkeypatch.setitem(globals(), name, lambda: 1)
    changing = globals()[name]
    changing.__qualname__ = changing.__name__ = name
    assert by_sync("w1", changing) == 1
