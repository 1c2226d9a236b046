"""Every call ends in one of: a value, the remote exception, PeerLost, RpcTimeout, Cancelled."""

from __future__ import annotations

import contextlib
import math
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import (
    WAYS,
    Box,
    Gate,
    by_async,
    by_remote,
    by_sync,
    echo,
    fail_with,
    until_begun,
    wait_at,
    wait_until,
)
from farcall import rpc
from farcall.runtime.agent import Agent

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class NeedsKeyword(Exception):
    def __init__(self, *, where: str) -> None:
        super().__init__("somewhere")
        self.where = where


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()
        self.number = 5


class WithTensor(Exception):
    pass


class NoReduction(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("can't be reduced")


class GoodbyeError(BaseException):
    pass


def raise_from(depth: int) -> None:
    if depth:
        raise_from(depth - 1)
    raise TwoArguments(5, "too deep")


def raise_local() -> None:
    raise type("LocalError", (Exception,), {})("of a local type")


def raise_unsendable() -> None:
    raise NoReduction("text of it")


def raise_with(kind: str) -> None:
    match kind:
        case "lock":
            raise HoldsLock
        case "cause":
            try:
                raise_from(0)
            except TwoArguments as error:
                raise ValueError("outer") from error
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "generator":
            raise GeneratorExit
        case "stop":
            raise StopIteration("stopped")
        case "base":
            raise GoodbyeError("bye")


def nested(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args)


def nested_without_limit(to: str, gate: Gate, begun: Gate, box: Box) -> None:
    begun.announce()
    try:
        rpc.rpc_sync(to, wait_at, args=(gate,), timeout=0)
    except BaseException as error:
        box.put(type(error))


# The remote exception.


@each_way
def test_an_exception_arrives_with_its_attributes(pair: list[Agent], call: Way) -> None:
    for to in ("w0", "w1"):
        with pytest.raises(TwoArguments, match="5: too deep") as raised:
            call(to, raise_from, (3,))
        assert (raised.value.code, raised.value.reason) == (5, "too deep")
        with pytest.raises(NeedsKeyword, match="somewhere") as keyword:
            call(to, fail_with, (NeedsKeyword(where="here"),))
        assert keyword.value.where == "here"


@each_way
def test_it_brings_the_remote_traceback_and_worker(pair: list[Agent], call: Way) -> None:
    with pytest.raises(TwoArguments) as raised:
        call("w1", raise_from, (3,))
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("in raise_from") >= 1
    assert "on worker 'w1'" in shown
    if call is not by_remote:
        assert raised.value.remote_worker == "w1"
        assert "in raise_from" in raised.value.remote_traceback


def test_the_traceback_of_a_cause_arrives_too(pair: list[Agent]) -> None:
    with pytest.raises(ValueError, match="outer") as raised:
        rpc.rpc_sync("w1", raise_with, args=("cause",))
    assert "TwoArguments: 5: too deep" in raised.value.remote_traceback


@pytest.mark.parametrize(
    "error",
    [
        KeyError("key"),
        OSError(2, "no such file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        torch.OutOfMemoryError("of memory"),
        RuntimeError(),
        AssertionError((1, 2)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_libraries_arrive(pair: list[Agent], error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        rpc.rpc_sync("w1", fail_with, args=(error,))
    assert raised.value.args == error.args
    assert str(raised.value) == str(error)


def test_an_exception_may_hold_a_tensor(pair: list[Agent]) -> None:
    with pytest.raises(WithTensor) as raised:
        rpc.rpc_sync("w1", fail_with, args=(WithTensor(torch.ones(20_000)),))
    assert raised.value.args[0].all()


def test_values_that_can_not_be_sent_are_left_out(pair: list[Agent]) -> None:
    with pytest.raises(HoldsLock, match="holds a lock") as raised:
        rpc.rpc_sync("w1", raise_with, args=("lock",))
    assert raised.value.number == 5


def test_an_exception_that_can_not_be_rebuilt_is_a_remote_error(pair: list[Agent]) -> None:
    with pytest.raises(rpc.RemoteError, match="text of it") as raised:
        rpc.rpc_sync("w1", raise_unsendable)
    assert raised.value.worker == "w1"
    assert raised.value.type_name.endswith("NoReduction")
    assert "in raise_unsendable" in raised.value.remote_traceback


def test_an_exception_of_a_local_type_arrives(pair: list[Agent]) -> None:
    with pytest.raises(Exception, match="of a local type") as raised:
        rpc.rpc_sync("w1", raise_local)
    assert type(raised.value).__name__ == "LocalError"


@each_way
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("exit", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("generator", "GeneratorExit"),
        ("base", f"{__name__}.GoodbyeError"),
    ],
)
def test_a_value_that_is_no_exception_arrives_as_a_remote_error_that_names_it(
    pair: list[Agent], call: Way, kind: str, name: str
) -> None:
    for to in ("w0", "w1"):
        with pytest.raises(rpc.RemoteError) as raised:
            call(to, raise_with, (kind,))
        assert (raised.value.type_name, raised.value.worker) == (name, to)
        assert "in raise_with" in raised.value.remote_traceback
        assert call(to, echo, (1,)) == 1


@pytest.mark.parametrize("call", [by_sync, by_async])
def test_stop_iteration_arrives(pair: list[Agent], call: Way) -> None:
    with pytest.raises(StopIteration) as raised:
        call("w1", raise_with, ("stop",))
    assert raised.value.value == "stopped"


@pytest.mark.parametrize("call", [by_sync, by_async])
def test_an_error_passes_through_several_workers(trio: list[Agent], call: Way) -> None:
    with pytest.raises(TwoArguments) as raised:
        call("w1", nested, ("w2", raise_from, 1))
    assert (raised.value.code, raised.value.remote_worker) == (5, "w2")
    assert "on worker 'w2'" in raised.value.remote_traceback


# RpcTimeout.


def test_a_call_that_was_late_at_the_default_limit_says_how_to_raise_it(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    start(2, rpc_timeout=0.05)
    with pytest.raises(rpc.RpcTimeout, match="pass timeout= to the call"):
        rpc.rpc_sync("w1", wait_at, args=(gate,))
    with pytest.raises(rpc.RpcTimeout) as raised:
        rpc.rpc_sync("w1", wait_at, args=(gate,), timeout=0.06)
    assert "timeout=" not in str(raised.value)


@each_way
def test_a_call_that_takes_too_long_times_out(pair: list[Agent], gate: Gate, call: Way) -> None:
    def use(to: str) -> Any:
        if call is by_remote:
            return rpc.remote(to, wait_at, args=(gate,)).to_here(timeout=0.05)
        return call(to, wait_at, (gate,), timeout=0.05)

    for to in ("w0", "w1"):
        with pytest.raises(rpc.RpcTimeout, match="more than set timeout") as raised:
            use(to)
        assert isinstance(raised.value, TimeoutError)
        assert isinstance(raised.value, RuntimeError)
        assert rpc.rpc_sync(to, echo, args=(1,)) == 1


def test_the_default_timeout_is_the_agents(start: Callable[..., list[Agent]], gate: Gate) -> None:
    start(2, rpc_timeout=0.05)
    for call in (by_sync, by_async):
        with pytest.raises(rpc.RpcTimeout, match=r"timeout \(50 ms\).*wait_at.*'w1'"):
            call("w1", wait_at, (gate,))
    with pytest.raises(rpc.RpcTimeout):
        rpc.remote("w1", wait_at, args=(gate,)).to_here()


def test_a_late_answer_is_ignored(pair: list[Agent], gate: Gate) -> None:
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5), timeout=0.05)
    with pytest.raises(rpc.RpcTimeout):
        rpc.rpc_sync("w1", wait_at, args=(gate, 5), timeout=0.05)
    with pytest.raises(rpc.RpcTimeout):
        future.wait()
    gate.open()
    gate.wait_for_passed(gate.arrived)
    assert [rpc.rpc_sync("w1", echo, args=(i,)) for i in range(10)] == list(range(10))
    with pytest.raises(rpc.RpcTimeout):
        future.wait()


def test_a_call_that_was_not_begun_in_time_is_never_run(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    start(2, num_worker_threads=1)
    box = Box()
    blocking = rpc.rpc_async("w1", wait_at, args=(gate,))
    gate.wait_for_arrivals()
    with pytest.raises(rpc.RpcTimeout):
        rpc.rpc_sync("w1", box.put, args=("ran",), timeout=0.05)
    # A confirmation after the CANCEL shows that it arrived: one link keeps the order.
    wait_until(rpc.remote("w1", echo, args=(1,)).confirmed_by_owner)
    gate.open()
    blocking.wait()
    rpc.rpc_sync("w1", echo, args=(1,))
    assert box.things == []


def test_a_nested_call_has_no_more_time_than_its_caller(trio: list[Agent], gate: Gate) -> None:
    begun, box = Gate(), Box()

    def attempt(seconds: float) -> None:
        with contextlib.suppress(rpc.RpcTimeout):  # its answer may come in the last moment
            args = ("w2", gate, begun, box)
            rpc.rpc_sync("w1", nested_without_limit, args=args, timeout=seconds)

    until_begun(begun, attempt, 0.1)
    assert box.wait_for()[0] is rpc.RpcTimeout  # long before anybody opens the gate


def test_many_timeouts_at_once(pair: list[Agent], gate: Gate) -> None:
    futures = [rpc.rpc_async("w1", wait_at, args=(gate,), timeout=0.1) for _ in range(300)]
    for future in futures:
        with pytest.raises(rpc.RpcTimeout):
            future.wait()
    gate.open()
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


def test_no_limit_means_no_limit(start: Callable[..., list[Agent]], gate: Gate) -> None:
    agents = start(2, rpc_timeout=0.0)
    future = rpc.rpc_async("w1", wait_at, args=(gate, 5))
    gate.wait_for_arrivals()
    assert agents[0].completion.deadlines.next == math.inf
    gate.open()
    assert future.wait() == 5
