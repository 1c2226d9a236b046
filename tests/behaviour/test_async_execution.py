"""`rpc.functions.async_execution` in every form."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import PROXIES, WAYS, Gate, by_sync, echo, fail_with, wait_at
from farcall import rpc
from farcall.runtime.agent import Agent

async_execution = rpc.functions.async_execution
Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)
each_proxy = pytest.mark.parametrize("proxy", PROXIES)


def completed(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@async_execution
def from_call(to: str, x: int, y: int) -> rpc.Future[int]:
    return rpc.rpc_async(to, echo, args=(x + y,))


@async_execution
def from_then(to: str, x: int, y: int) -> rpc.Future[int]:
    return rpc.rpc_async(to, echo, args=(x,)).then(lambda future: future.wait() + y)


@async_execution
def from_nested_thens(to: str, x: int, y: int) -> Any:
    def add(future: Any) -> Any:
        return rpc.rpc_async(to, torch.add, args=(future.wait(), y)).wait()

    return rpc.rpc_async(to, torch.add, args=(torch.tensor(x), 0)).then(add)


@async_execution
def from_constructor(to: str, x: int, y: int) -> torch.futures.Future[int]:
    return completed(x + y)


@async_execution
def from_thread(to: str, x: int, y: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    threading.Thread(target=lambda: future.set_result(x + y)).start()
    return future


@async_execution
def from_collect_all(to: str, x: int, y: int) -> Any:
    futures = [rpc.rpc_async(to, echo, args=(n,)) for n in (x, y)]
    return torch.futures.collect_all(futures).then(
        lambda all_of_them: sum(future.wait() for future in all_of_them.wait())
    )


@async_execution
def through_another(to: str, x: int, y: int) -> rpc.Future[int]:
    return rpc.rpc_async(to, from_then, args=("w0", x, y))


class Adder:
    def __init__(self, bias: int = 0) -> None:
        self.bias = bias

    @staticmethod
    @async_execution
    def static(to: str, x: int, y: int) -> rpc.Future[int]:
        return rpc.rpc_async(to, echo, args=(x,)).then(lambda future: future.wait() + y)

    @classmethod
    @async_execution
    def of_class(cls, to: str, x: int, y: int) -> rpc.Future[int]:
        assert cls is Adder
        return rpc.rpc_async(to, echo, args=(x + y,))

    @async_execution
    def bound(self, to: str, x: int, y: int) -> rpc.Future[int]:
        return rpc.rpc_async(to, echo, args=(x,)).then(lambda f: f.wait() + y + self.bias)

    @async_execution
    def constructed(self, to: str, x: int, y: int) -> torch.futures.Future[int]:
        return completed(x + y)


FUNCTIONS = {
    "call": from_call,
    "then": from_then,
    "nested thens": from_nested_thens,
    "constructor": from_constructor,
    "thread": from_thread,
    "collect_all": from_collect_all,
    "through another": through_another,
    "static method": Adder.static,
    "class method": Adder.of_class,
    "bound method": Adder().bound,
    "constructor in a bound method": Adder().constructed,
    "lambda": async_execution(lambda to, x, y: rpc.rpc_async(to, echo, args=(x + y,))),
}


@each_way
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_value_is_that_of_the_future(trio: list[Agent], call: Way, function: str) -> None:
    assert call("w1", FUNCTIONS[function], ("w2", 1, 2)) == 3


@each_way
def test_it_works_towards_oneself(pair: list[Agent], call: Way) -> None:
    assert call("w0", from_then, ("w0", 1, 2)) == 3
    assert call("w1", from_then, ("w1", 1, 2)) == 3
    assert call("w1", from_then, ("w0", 1, 2)) == 3


@each_proxy
@pytest.mark.parametrize("method", ["static", "of_class", "bound", "constructed"])
def test_reference_proxies_honour_it(trio: list[Agent], proxy: Way, method: str) -> None:
    adder = rpc.remote("w1", Adder)
    assert proxy(adder, method, "w2", 1, 2) == 3
    assert proxy(adder, method, "w0", x=1, y=2) == 3
    assert proxy(rpc.RRef(Adder()), method, "w2", 1, 2) == 3


def test_called_locally_it_returns_the_future(pair: list[Agent]) -> None:
    future = from_then("w1", 1, 2)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == 3
    assert from_then.__name__ == "from_then"


def test_no_thread_waits_for_the_future(start: Callable[..., list[Agent]], gate: Gate) -> None:
    start(3, num_worker_threads=1)
    waiting = [rpc.rpc_async("w1", wait_elsewhere, args=(gate, i)) for i in range(20)]
    assert rpc.rpc_sync("w1", echo, args=("free",)) == "free"
    assert not any(future.done() for future in waiting)
    gate.open()
    assert torch.futures.wait_all(waiting) == list(range(20))


@async_execution
def wait_elsewhere(gate: Gate, result: int) -> rpc.Future[int]:
    return rpc.rpc_async("w2", wait_at, args=(gate, result))


class Batch:
    """Collects calls, and answers them all when the last one came: batching as in the tutorial."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.future: torch.futures.Future[list[int]] = torch.futures.Future()
        self.numbers: list[int] = []

    @async_execution
    def add(self, number: int) -> Any:
        with self.lock:
            self.numbers.append(number)
            place = len(self.numbers) - 1
            answer = self.future.then(lambda future: future.wait()[place])
            complete = len(self.numbers) == self.size
        if complete:
            self.future.set_result([10 * number for number in self.numbers])
        return answer


def test_calls_can_be_answered_together(start: Callable[..., list[Agent]]) -> None:
    start(2, num_worker_threads=1)
    batch = rpc.remote("w1", Batch, args=(20,))
    futures = [batch.rpc_async().add(i) for i in range(20)]
    assert torch.futures.wait_all(futures) == [10 * i for i in range(20)]


# Functions that go wrong.


@async_execution
def not_a_future(*args: Any) -> Any:
    return 3


@async_execution
def raises(*args: Any) -> Any:
    raise KeyError("before it made a future")


@async_execution
def future_of_failing_call(*args: Any) -> Any:
    return rpc.rpc_async("w0", fail_with, args=(KeyError("in the nested call"),))


@async_execution
def failing_callback(*args: Any) -> Any:
    return rpc.rpc_async("w0", echo, args=(1,)).then(lambda f: fail_with(KeyError("in then")))


@async_execution
def failed_by_hand(*args: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(KeyError("by hand"))
    return future


class Wrong:
    @async_execution
    def not_a_future(self) -> Any:
        return 3

    @async_execution
    def raises(self) -> Any:
        raise KeyError("gone")


@each_way
def test_a_value_that_is_no_future_is_refused(pair: list[Agent], call: Way) -> None:
    with pytest.raises(TypeError, match=r"must return a torch.futures.Future object, .* int"):
        call("w1", not_a_future)


@each_proxy
def test_a_value_that_is_no_future_is_refused_through_proxies(
    pair: list[Agent], proxy: Way
) -> None:
    with pytest.raises(TypeError, match=r"must return a torch.futures.Future object"):
        proxy(rpc.remote("w1", Wrong), "not_a_future")
    with pytest.raises(KeyError):
        proxy(rpc.remote("w1", Wrong), "raises")


@each_way
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises, "before it made"),
        (future_of_failing_call, "in the nested call"),
        (failing_callback, "in then"),
        (failed_by_hand, "by hand"),
    ],
)
def test_errors_reach_the_caller(
    pair: list[Agent], call: Way, function: Callable[..., Any], text: str
) -> None:
    with pytest.raises(KeyError, match=text):
        call("w1", function)


def test_a_future_that_never_ends_times_out(pair: list[Agent]) -> None:
    with pytest.raises(rpc.RpcTimeout):
        by_sync("w1", never, timeout=0.05)
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


@async_execution
def never() -> torch.futures.Future[Any]:
    return torch.futures.Future()


def test_an_unsendable_result_is_reported(pair: list[Agent]) -> None:
    with pytest.raises(TypeError, match=r"result of .*unsendable"):
        rpc.rpc_sync("w1", unsendable)


@async_execution
def unsendable() -> torch.futures.Future[Any]:
    return completed(threading.Lock())
