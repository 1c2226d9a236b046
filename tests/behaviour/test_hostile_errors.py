"""Every call ends whatever the special methods of its exceptions and values do."""

from __future__ import annotations

import contextvars
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from behaviour.helpers import by_async, by_remote, by_sync, in_threads, wait_until
from farcall import autograd, rpc
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent

# Overridden one at a time. Those of the second row are read as attributes.
METHODS = (
    *("str", "repr", "eq", "hash", "bool", "len", "iter", "format", "sizeof", "dir", "call"),
    *("setattr", "delattr", "getattr", "getattribute", "new", "init_subclass", "instancecheck"),
    *("reduce", "reduce_ex", "getstate", "setstate", "copy", "deepcopy", "del", "get", "set"),
)
ATTRIBUTES = (
    *("__class__", "__traceback__", "__cause__", "__context__", "__suppress_context__"),
    *("__notes__", "__dict__", "args", "with_traceback", "add_note"),
    *("remote_worker", "remote_traceback", "__torch_function__", "name", "obj"),
)
FROM_METHODS = (ValueError, SystemExit, KeyboardInterrupt)


def _class_of(member: str, raises: type[BaseException], base: type) -> type:
    """Return a class, found in this module by its name, one of whose members raises when used.

    `__new__` raises only the second time, and attributes of the instance may be set by the base.
    """
    state = {"made": 0}

    def fail(*_: Any, **__: Any) -> Any:
        raise raises(f"from {member}")

    def new(cls: Any, *args: Any) -> Any:
        state["made"] += 1
        return base.__new__(cls, *args) if state["made"] % 2 else fail()

    name = f"Hostile_{base.__name__}_{member.strip('_')}_{raises.__name__}"
    body: dict[str, Any] = {"__module__": __name__, "__qualname__": name}
    if member in ATTRIBUTES:
        body[member] = property(fail, fail, fail)
    else:
        body[f"__{member}__"] = new if member == "new" else fail
    made = type(name, (base,), body)
    setattr(sys.modules[__name__], name, made)
    return made


class Plain:
    """The base of hostile values."""


def _classes_of(member: str, base: type) -> dict[type[BaseException], type]:
    return {raises: _class_of(member, raises, base) for raises in FROM_METHODS}


ERRORS = {member: _classes_of(member, Exception) for member in (*METHODS, *ATTRIBUTES)}
BASE_ERRORS = [
    _class_of(member, ValueError, BaseException) for member in ("str", "reduce_ex", "setattr")
]
VALUES = {member: _classes_of(member, Plain) for member in METHODS}


def on(transport: str, classes: dict[type[BaseException], type]) -> list[type]:
    """Return the classes to try there: of every kind, each other one on one transport."""
    other = SystemExit if transport == "inproc" else KeyboardInterrupt
    return [classes[ValueError], classes[other]]


@dataclasses.dataclass(frozen=True)
class BadMove(Exception):
    move: int


class Group:
    """A value with methods that raise, and give hostile values."""

    def fail(self, name: str) -> None:
        fail(name)

    def give(self, name: str) -> Any:
        return give(name)


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        fail(ctx.name)


class Module(torch.nn.Module):
    def forward(self, name: str) -> None:
        fail(name)


class Optimizer(torch.optim.SGD):
    name = ""

    def step(self, closure: Any = None) -> Any:
        fail(type(self).name)


class CallsTwice(torch.futures.Future[int]):
    """A future that calls back twice."""

    def add_done_callback(self, callback: Any) -> None:
        callback(self)
        callback(self)


class RaisesAfterCalling(torch.futures.Future[int]):
    """A future that calls back, and then raises."""

    def add_done_callback(self, callback: Any) -> None:
        callback(self)
        raise ValueError("after calling back")


@rpc.functions.async_execution
def odd_future(name: str) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = getattr(sys.modules[__name__], name)()
    future.set_result(7)
    return future


@pytest.fixture(autouse=True, scope="module")
def _no_hostile_garbage() -> Iterator[None]:
    """Destructors that raise must not run in what comes after these tests.

    Python 3.11 reports such an error by parsing source code, which fails another `ast.parse` that
    the garbage collector has interrupted with "AST constructor recursion depth mismatch".
    """
    yield
    gc.collect()


def fail(name: str) -> None:
    raise getattr(sys.modules[__name__], name)(1)


def fail_from(name: str) -> None:
    raise KeyError("outer") from getattr(sys.modules[__name__], name)(1)


def fail_after(name: str) -> None:
    try:
        fail(name)
    except BaseException:
        raise KeyError("outer")  # noqa: B904


def give(name: str) -> Any:
    return getattr(sys.modules[__name__], name)()


@rpc.functions.async_execution
def fail_later(name: str) -> rpc.Future[Any]:
    future: rpc.Future[Any] = rpc.Future()
    try:
        fail(name)
    except BaseException as error:
        future.set_exception(error)
    return future


@rpc.functions.async_execution
def fail_in_callback(name: str) -> rpc.Future[Any]:
    future: rpc.Future[Any] = rpc.Future()
    later = future.then(lambda _: fail(name))
    future.set_result(None)
    return later


@rpc.functions.async_execution
def give_later(name: str) -> rpc.Future[Any]:
    future: rpc.Future[Any] = rpc.Future()
    future.set_result(give(name))
    return future


def nest(function: Callable[..., Any], name: str) -> Any:
    return rpc.rpc_sync("w0", function, args=(name,))


def through_backward(value: torch.Tensor, name: str) -> torch.Tensor:
    return Backwards.apply(value, name)


def with_hook(value: torch.Tensor, name: str) -> torch.Tensor:
    doubled = value * 2
    doubled.register_hook(lambda _: fail(name))
    return doubled * 2


def backward_through(function: Callable[..., Any], name: str) -> None:
    with autograd.context() as context:
        value = rpc.rpc_sync("w1", function, args=(torch.ones(2, requires_grad=True), name))
        autograd.backward(context, [value.sum()])


def step(name: str) -> None:
    Optimizer.name = name
    parameter = rpc.remote("w1", torch.nn.Parameter, args=(torch.ones(2),))
    optimizer = DistributedOptimizer(Optimizer, [parameter], lr=0.1)
    with autograd.context() as context:
        loss = rpc.rpc_sync("w1", total, args=(parameter,))
        autograd.backward(context, [loss])
        optimizer.step(context)


def total(parameter: rpc.RRef[Any]) -> torch.Tensor:
    return (parameter.local_value() * 2).sum()


def calls_that_fail(name: str) -> Iterator[Callable[[], Any]]:
    for to in ("w1", "w0"):
        for call in (by_sync, by_async, by_remote):
            for function in (fail, fail_later, fail_in_callback):
                yield lambda to=to, call=call, function=function: call(to, function, (name,))
        group = rpc.remote(to, Group)
        yield lambda group=group: group.rpc_sync().fail(name)
        yield lambda group=group: group.rpc_async().fail(name).wait()
        yield lambda group=group: group.remote().fail(name).to_here()
    yield lambda: rpc.remote("w0", fail, args=(name,)).local_value()
    yield lambda: rpc.rpc_sync("w1", nest, args=(fail, name))
    yield lambda: rpc.rpc_async("w1", fail, args=(name,)).then(lambda done: done.wait()).wait()
    yield lambda: torch.futures.wait_all([rpc.rpc_async("w1", fail, args=(name,))])
    yield lambda: backward_through(through_backward, name)
    yield lambda: backward_through(with_hook, name)
    yield lambda: step(name)
    yield lambda: RemoteModule("w1", Module).forward(name)


def calls_with_values(name: str) -> Iterator[Callable[[], Any]]:
    for to in ("w1", "w0"):
        for call in (by_sync, by_async, by_remote):
            yield lambda to=to, call=call: call(to, give, (name,))
            yield lambda to=to, call=call: call(to, give_later, (name,))
            yield lambda to=to, call=call: call(to, id, (give(name),))
        group = rpc.remote(to, Group)
        yield lambda group=group: group.rpc_sync().give(name)
        yield lambda group=group: group.rpc_async().give(name).wait()
    yield lambda: rpc.rpc_sync("w1", nest, args=(give, name))


def is_idle(agent: Agent) -> bool:
    calls = [record for peer in agent.directory.all() for record in peer.outgoing.records()]
    return not calls and not agent.coordinator.active


def outcomes_of(calls: Iterator[Callable[[], Any]]) -> list[Any]:
    """Return the value or the error of each call."""
    results: list[Any] = []

    def make_all() -> None:
        for call in calls:
            try:
                results.append(contextvars.copy_context().run(call))
            except BaseException as error:
                results.append(error)

    # In a thread, so that a call that hangs ends the test, and not more.
    with in_threads(partial(contextvars.copy_context().run, make_all)) as ended:
        pass
    assert ended[0] is None, "no call could be made"
    return results


@pytest.mark.usefixtures("without_reports_of_torch")
@pytest.mark.parametrize("member", ERRORS)
@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_every_call_ends_that_fails_with_a_hostile_exception(
    pair: list[Agent], transport: str, member: str
) -> None:
    for kind in on(transport, ERRORS[member]):
        check_calls_that_fail(pair, kind)


@pytest.mark.parametrize("member", ERRORS)
@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_exception_arrives_that_was_raised_from_a_hostile_one(
    pair: list[Agent], transport: str, member: str
) -> None:
    name = ERRORS[member][ValueError].__name__
    wanted = [KeyError] if member != "new" else [KeyError, ValueError]
    calls = [
        partial(call, to, function, (name,))
        for function in (fail_from, fail_after)
        for to in ("w1", "w0")
        for call in (by_sync, by_async, by_remote)
    ]
    calls += [partial(by_sync, "w1", nest, (fail_from, name))]
    for result in outcomes_of(iter(calls)):
        assert type(result) in wanted, type(result)
    wait_until(lambda: all(is_idle(agent) for agent in pair))


@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_every_call_ends_that_fails_with_another_base_or_refuses_changes(pair: list[Agent]) -> None:
    for kind in (BadMove, *BASE_ERRORS):
        check_calls_that_fail(pair, kind)


def check_calls_that_fail(pair: list[Agent], kind: type) -> None:
    for result in outcomes_of(calls_that_fail(kind.__name__)):
        # Itself, or what stands for it. Not by isinstance: that asks the instance.
        if not issubclass(type(result), kind):
            # With a `__new__` that raises, that is what the function raised.
            is_new = "_new_" in kind.__name__
            assert type(result) is rpc.RemoteError or is_new, (kind, type(result))
    wait_until(lambda: all(is_idle(agent) for agent in pair))
    assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1


@pytest.mark.parametrize("member", VALUES)
@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_every_call_ends_that_carries_a_hostile_value(
    pair: list[Agent], transport: str, member: str
) -> None:
    for kind in on(transport, VALUES[member]):
        for result in outcomes_of(calls_with_values(kind.__name__)):
            assert not issubclass(type(result), rpc.NotInitialized | rpc.RpcTimeout), (kind, result)
        wait_until(lambda: all(is_idle(agent) for agent in pair))
        assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1


@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_an_exception_that_refuses_changes_arrives_as_itself(pair: list[Agent]) -> None:
    for result in outcomes_of(calls_that_fail("BadMove")):
        assert (type(result), result.move) == (BadMove, 1)


@pytest.mark.parametrize("name", ["CallsTwice", "RaisesAfterCalling"])
@pytest.mark.parametrize("to", ["w0", "w1"])
@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_a_request_ends_once_whatever_its_future_does(
    pair: list[Agent], to: str, name: str
) -> None:
    for call in (by_sync, by_async, by_remote):
        assert call(to, odd_future, (name,)) == 7
    wait_until(lambda: all(is_idle(agent) for agent in pair))
    # Ended twice, it would have been taken off the count of some other call.
    for call in (by_sync, by_async, by_remote):
        assert call(to, abs, (-1,)) == 1
    wait_until(lambda: all(is_idle(agent) for agent in pair))
