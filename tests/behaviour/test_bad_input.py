"""Input that makes no sense gets a clear error at once, and hurts nothing else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from behaviour.helpers import WAYS, Box, echo, fail_with
from farcall import rpc
from farcall.errors import BadFrame, FunctionNotFound, Refused, SerializationError, UnknownWorker
from farcall.runtime.agent import Agent
from farcall.serde import Only
from farcall.wire.frames import Frame
from farcall.wire.messages import Accepted

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)


class Stubborn:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def work(self) -> int:
        return 1

    def rest(self) -> int:
        return 0


class Unloadable:
    def __reduce__(self) -> Any:
        return fail_with, (ValueError("no way to rebuild this"),)


def make_lock() -> Any:
    return threading.Lock()


def make_unloadable() -> Any:
    return Unloadable()


def still_works() -> None:
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


@each_way
@pytest.mark.parametrize("to", ["nobody", 7, -1, rpc.WorkerInfo("nobody", 7), ""])
def test_an_unknown_worker_lists_the_known_ones(pair: list[Agent], call: Way, to: Any) -> None:
    with pytest.raises(UnknownWorker, match=r"'w0' \(id 0\), 'w1' \(id 1\)"):
        call(to, echo, (1,))
    with pytest.raises(UnknownWorker):
        rpc.get_worker_info(to)


@each_way
@pytest.mark.parametrize("to", [None, 1.0, b"w1", ["w1"]])
def test_a_worker_must_be_named_sensibly(pair: list[Agent], call: Way, to: Any) -> None:
    with pytest.raises((TypeError, UnknownWorker), match="a str, an int or a WorkerInfo"):
        call(to, echo, (1,))


@each_way
def test_an_argument_that_can_not_be_sent_is_named(pair: list[Agent], call: Way) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"argument 1 \(lock\) of .*echo"):
        call("w1", echo, (1, lock))
    with pytest.raises(SerializationError, match=r"keyword argument 'value' \(list\) of .*echo"):
        call("w1", echo, kwargs={"value": [lock]})
    with pytest.raises(SerializationError, match="lock"):
        call("w1", Stubborn().work)
    with pytest.raises(SerializationError, match="lock"):
        call("w1", lambda: lock)
    still_works()


@each_way
def test_an_argument_that_can_not_be_rebuilt_is_reported(pair: list[Agent], call: Way) -> None:
    with pytest.raises(SerializationError, match="no way to rebuild this"):
        call("w1", echo, (Unloadable(),))
    still_works()


@each_way
def test_a_result_that_can_not_be_sent_is_reported(pair: list[Agent], call: Way) -> None:
    with pytest.raises(SerializationError, match=r"(result|value) of .* can't be sent.*lock"):
        call("w1", make_lock)
    still_works()


@each_way
def test_a_result_that_can_not_be_rebuilt_is_reported(pair: list[Agent], call: Way) -> None:
    with pytest.raises(SerializationError, match="no way to rebuild this"):
        call("w1", make_unloadable)
    still_works()


def test_a_tensor_without_memory_is_reported(pair: list[Agent]) -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="argument 0"):
        rpc.rpc_sync("w1", echo, args=(tensor,))


@each_way
def test_a_function_that_the_callee_lacks_is_named(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, call: Way
) -> None:
    missing = "farcall_no_such_module:nothing"
    monkeypatch.setattr("farcall.runtime.calls.pickling.name_of", lambda function: missing)
    with pytest.raises(FunctionNotFound, match="no module named 'farcall_no_such_module'"):
        call("w1", make_lock)
    missing = f"{__name__}:nothing"
    with pytest.raises(FunctionNotFound, match="has no attribute 'nothing'"):
        call("w1", make_lock)
    missing = f"{__name__}:each_way"
    monkeypatch.setattr(sys.modules[__name__], "each_way", 5)
    with pytest.raises(FunctionNotFound, match="not callable"):
        call("w1", make_lock)
    monkeypatch.undo()
    still_works()


@each_way
@pytest.mark.parametrize(
    "timeout", ["1", None, True, [1], np.ones(2), torch.ones(2), Decimal(1), timedelta(1)]
)
def test_a_timeout_must_be_a_number(pair: list[Agent], call: Way, timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout"):
        call("w1", echo, (1,), timeout=timeout)
    rref = rpc.RRef(1)
    for use in (rref.to_here, rref.rpc_sync, rref.rpc_async, rref.remote):
        with pytest.raises(TypeError, match="timeout"):
            use(timeout)


@each_way
@pytest.mark.parametrize("timeout", [-2, -0.5, float("nan"), float("-inf"), -(10**400)])
def test_a_timeout_must_be_sensible(pair: list[Agent], call: Way, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        call("w1", echo, (1,), timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        rpc.RRef(1).to_here(timeout)


@each_way
@pytest.mark.parametrize("args", [5, "text", {1: 2}, torch.ones(2)])
def test_args_must_be_a_tuple(pair: list[Agent], call: Way, args: Any) -> None:
    with pytest.raises(TypeError, match="args must be a tuple"):
        call("w1", echo, args)


@each_way
@pytest.mark.parametrize("kwargs", [5, [("a", 1)], "text"])
def test_kwargs_must_be_a_dict(pair: list[Agent], call: Way, kwargs: Any) -> None:
    with pytest.raises(TypeError, match="kwargs must be a dict"):
        call("w1", echo, (), kwargs=kwargs)


@each_way
@pytest.mark.parametrize("function", [None, "echo", 5])
def test_the_called_object_must_be_callable(pair: list[Agent], call: Way, function: Any) -> None:
    with pytest.raises(TypeError, match="func must be callable"):
        call("w1", function)


@each_way
def test_wrong_arguments_are_the_functions_own_error(pair: list[Agent], call: Way) -> None:
    with pytest.raises(TypeError, match=r"echo\(\) takes 1 positional argument but 2 were given"):
        call("w1", echo, (1, 2))


# Before init_rpc and after shutdown.


@each_way
def test_an_answer_of_another_kind_ends_the_call(pair: list[Agent], call: Way) -> None:
    answers = pair[1].answers
    send = answers.send
    answers.send = lambda job, frame: send(job, Frame(Accepted(), frame.call_id))  # type: ignore[method-assign]
    with pytest.raises(BadFrame, match="worker 'w1' answered a call for a value with Accepted"):
        call("w1", echo, (1,))


@each_way
def test_nothing_works_without_an_agent(call: Way) -> None:
    for use in (
        lambda: call("w1", echo, (1,)),
        lambda: rpc.RRef(1),
        rpc.get_worker_info,
        rpc.shutdown,
    ):
        with pytest.raises(rpc.NotInitialized, match="init_rpc"):
            use()


@each_way
def test_nothing_works_after_shutdown(pair: list[Agent], call: Way) -> None:
    rref = rpc.remote("w1", echo, args=(1,))
    assert rref.to_here() == 1
    pair[0].close()
    for use in (
        lambda: call("w1", echo, (1,)),
        lambda: call("w0", echo, (1,)),
        rref.to_here,
        lambda: rref.rpc_sync().bit_length(),
    ):
        with pytest.raises((rpc.NotInitialized, rpc.Cancelled), match="'w0' was shut down"):
            use()


# Policies of the callee.


@each_way
def test_a_policy_allows_functions_by_name(start: Callable[..., list[Agent]], call: Way) -> None:
    start(2, policies={"w1": Only([echo, torch.add])})
    assert call("w1", echo, (1,)) == 1
    assert call("w1", torch.add, (torch.tensor(1), 1)) == 2
    with pytest.raises(Refused, match=r"does not allow calls of .*make_lock"):
        call("w1", make_lock)
    with pytest.raises(SerializationError, match="has no name by which another worker finds it"):
        call("w1", lambda: 1)


def test_a_policy_holds_for_methods_of_references(start: Callable[..., list[Agent]]) -> None:
    start(2, policies={"w1": Only([Stubborn, Stubborn.work])})
    rref = rpc.remote("w1", Stubborn)
    assert rref.rpc_sync().work() == 1
    with pytest.raises(Refused, match="rest"):
        rref.rpc_sync().rest()
    with pytest.raises(Refused):
        rpc.rpc_sync("w1", echo, args=(1,))


@each_way
def test_pickles_are_refused_where_there_is_a_policy(
    start: Callable[..., list[Agent]], call: Way
) -> None:
    only = Only([echo, fail_with])
    agents = start(2, policies={"w0": only, "w1": only})
    box = Box()
    assert torch.equal(call("w1", echo, (torch.ones(3),)), torch.ones(3))
    assert call("w1", echo, ({"a": [1, "b", None]},)) == {"a": [1, "b", None]}
    with pytest.raises(SerializationError, match="in a way of its own"):
        call("w1", echo, (box,))
    with pytest.raises(KeyError):
        call("w1", fail_with, (KeyError("plain"),))
    rref = rpc.RRef(1)
    assert len(agents) == 2
    assert rpc.rpc_sync("w1", echo, args=(rref,)).to_here() == 1


class ExitsWhenPickled:
    def __reduce__(self) -> str:
        raise SystemExit("while it was pickled")


@pytest.mark.usefixtures("pair")
def test_a_result_whose_pickling_wants_to_exit_is_answered() -> None:
    with pytest.raises(SerializationError, match="while it was pickled"):
        rpc.rpc_sync("w1", ExitsWhenPickled, timeout=0)
