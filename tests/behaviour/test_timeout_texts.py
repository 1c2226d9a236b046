"""Every `RpcTimeout` says what took too long, how long the limit was, and how to raise it."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from patience import PATIENCE

from behaviour.helpers import Account, Gate, Here, echo, until_begun, wait_at
from behaviour.test_calls_without_end import never
from farcall import autograd, rpc
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent
from farcall.runtime.calls import server_call

pytestmark = pytest.mark.parametrize("transport", ["native"])
LIMIT = 0.15  # seconds
AT_CALL = "pass timeout= to the call, or rpc_timeout= in the options of init_rpc, for more"
AT_INIT = "pass rpc_timeout= in the options of init_rpc for more"
INHERITED = "while serving the call of .* by worker 'w0'. Pass timeout= to that call, or rpc_"
Call = Callable[[], Any]


class Waits(torch.nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, *_: Any) -> None:
        self.gate.wait()


class WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.gate = gate
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.gate.wait()
        return *grads, None


class WaitingOptimizer(torch.optim.SGD):
    def __init__(self, params: Any, gate: Gate) -> None:
        super().__init__(params, lr=0.1)
        self.gate = gate

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.gate.wait()


class Stage(Gate):
    """A stage: calls are prepared without a limit that matters, then made with a short one."""

    def __init__(self, agents: list[Agent], stack: contextlib.ExitStack) -> None:
        super().__init__()
        self.agents = agents
        self.stack = stack

    def limit(self) -> None:
        for agent in self.agents:
            agent.status.rpc_timeout = LIMIT


@pytest.fixture
def stage(pair: list[Agent]) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        stage = Stage(pair, stack)
        rpc.rpc_sync("w1", echo, args=(1,))
        yield stage
        stage.open()


def prepare_backward(stage: Stage) -> Call:
    context = stage.stack.enter_context(autograd.context())
    x = torch.ones(1, requires_grad=True)
    y = rpc.rpc_sync("w1", WaitsInBackward.apply, args=(x, stage))
    return lambda: autograd.backward(context, [y.sum()])


def prepare_step(stage: Stage) -> Call:
    parameter = rpc.remote("w1", torch.nn.Parameter, args=(torch.ones(1),))
    optimizer = DistributedOptimizer(WaitingOptimizer, [parameter], stage)
    context = stage.stack.enter_context(autograd.context())
    return lambda: optimizer.step(context)


def prepare_method(stage: Stage, call: Callable[[rpc.RRef[Any]], Any]) -> Call:
    rref = rpc.remote("w1", Account)
    rref.rpc_sync().where()
    return lambda: call(rref)


def prepare_module(stage: Stage, call: Callable[[RemoteModule], Any]) -> Call:
    module = RemoteModule("w1", Waits, args=(stage,))
    module.train()
    return lambda: call(module)


def error_of(function: Callable[..., Any], *args: Any) -> BaseException:
    try:
        function(*args)
    except rpc.RpcTimeout as error:
        return rpc.RpcTimeout(*error.args)
    raise AssertionError("no timeout")


METHOD = "method 'wait' of a remote value"
UNMADE = "the value of this reference is not made yet"
FORWARD = "forward of a RemoteModule on worker 'w1'"
# The call that times out, what its error says was late, and of the limit.
ENTRIES: dict[str, tuple[Callable[[Stage], Call], str, str]] = {
    "rpc_sync": (
        lambda stage: lambda: rpc.rpc_sync("w1", wait_at, args=(stage,)),
        "wait_at on worker 'w1'",
        AT_CALL,
    ),
    "rpc_async": (
        lambda stage: lambda: rpc.rpc_async("w1", wait_at, args=(stage,)).wait(),
        "wait_at on worker 'w1'",
        AT_CALL,
    ),
    "to_here": (
        lambda stage: lambda: rpc.remote("w1", wait_at, args=(stage,)).to_here(),
        "to_here on worker 'w1'",
        AT_CALL,
    ),
    "to_here of one's own": (lambda _: lambda: rpc.remote("w0", never).to_here(), UNMADE, AT_CALL),
    "proxy": (
        lambda stage: prepare_method(stage, lambda rref: rref.rpc_sync().wait(stage)),
        METHOD,
        AT_CALL,
    ),
    "proxy, asynchronous": (
        lambda stage: prepare_method(stage, lambda rref: rref.rpc_async().wait(stage).wait()),
        METHOD,
        AT_CALL,
    ),
    "proxy, remote": (
        lambda stage: prepare_method(stage, lambda rref: rref.remote().wait(stage).to_here()),
        "to_here on worker 'w1'",
        AT_CALL,
    ),
    # The error may be the caller's or the owner's, whose time ends at the same moment.
    "method of an unmade object": (
        lambda _: lambda: rpc.remote("w1", never).rpc_sync().wait(),
        METHOD,
        "ass timeout= to",
    ),
    "RemoteModule": (
        lambda stage: prepare_module(stage, lambda module: module()),
        FORWARD,
        AT_CALL,
    ),
    "forward_async": (
        lambda stage: prepare_module(stage, lambda module: module.forward_async().wait()),
        FORWARD,
        AT_CALL,
    ),
    "backward": (prepare_backward, "a backward pass", AT_INIT),
    "step": (prepare_step, "method 'step' of a remote value on worker 'w1'", AT_CALL),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_timeout_says_what_how_long_and_how_to_raise_it(stage: Stage, entry: str) -> None:
    prepare, what, how = ENTRIES[entry]
    call = prepare(stage)
    stage.limit()
    with pytest.raises(rpc.RpcTimeout) as raised:
        call()
    text = str(raised.value)
    assert what in text
    assert text.startswith("RPC ran for more than set timeout (150 ms): ")
    assert how in text
    assert "farcall." not in text


# The error that the function raised stays at the callee, for the caller has timed out, too.
NESTED: dict[str, Callable[[Gate], Any]] = {
    "rpc_sync": lambda gate: rpc.rpc_sync("w0", wait_at, args=(gate,), timeout=0),
    "to_here of one's own": lambda gate: rpc.remote("w1", never).to_here(0),
    "local_value": lambda gate: rpc.remote("w1", never).local_value(),
    "late call": lambda gate: [error_of(rpc.remote("w1", never).to_here), rpc.rpc_sync("w0", echo)],
}


class Errors(Here):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []
        self.begun = Gate()
        self.gate = Gate()


def keep_error(kept: Errors, entry: str, gate: Gate) -> None:
    kept.begun.announce()
    try:
        NESTED[entry](gate)
    except BaseException as error:
        kept.errors.append(error)
        kept.gate.open()
        gate.wait()  # the caller has timed out, and is not to be answered at the same moment


@pytest.mark.parametrize("entry", NESTED)
def test_a_deadline_of_a_call_being_served_says_so(
    pair: list[Agent], gate: Gate, entry: str
) -> None:
    kept = Errors()

    def attempt(seconds: float) -> None:
        with pytest.raises(rpc.RpcTimeout):
            rpc.rpc_sync("w1", keep_error, args=(kept, entry, gate), timeout=seconds)

    limit = until_begun(kept.begun, attempt, LIMIT)
    kept.gate.wait()
    error = kept.errors[0]
    assert isinstance(error, rpc.RpcTimeout)
    # The time that was left when it was called, or that the caller had given.
    told = re.match(r"RPC ran for more than set timeout \((\d+) ms\): ", str(error))
    assert told is not None, error
    assert 0 <= int(told[1]) / 1000 <= limit + 0.001, error
    assert re.search(INHERITED, str(error)), error


class Late:
    """A clock by which each deadline has passed."""

    @staticmethod
    def monotonic() -> float:
        return math.inf


# The caller and the worker that it calls notice at the same moment, and either may tell.
def test_a_call_that_comes_too_late_to_be_run_says_the_same(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_call, "time", Late)
    text = rf"^RPC ran for more than set timeout \({PATIENCE * 1000:.0f} ms\): .* was not run by"
    with pytest.raises(rpc.RpcTimeout, match=text):
        rpc.rpc_sync("w1", echo, args=(1,), timeout=PATIENCE)


def test_a_shutdown_that_takes_too_long_says_how_long(pair: list[Agent]) -> None:
    with pytest.raises(rpc.RpcTimeout, match=r"'w0' took longer than 0\.1 s"):
        pair[0].shutdown(timeout=0.1)


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def unsendable() -> Unsendable:
    return Unsendable()


def test_a_value_that_can_not_be_sent_is_called_that(pair: list[Agent]) -> None:
    rref = rpc.remote("w1", unsendable)
    with pytest.raises(TypeError, match=r"value of the reference, of type .*\.Unsendable, can't"):
        rref.to_here()


CALLS_WITH_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    r"argument 0 .* of method 'deposit' of a remote value": lambda value: (
        rpc.remote("w1", Account).rpc_sync().deposit(value)
    ),
    r"keyword argument 'amount' .* of method 'deposit' of a remote value": lambda value: (
        rpc.remote("w1", Account).rpc_async().deposit(amount=value)
    ),
    r"argument 1 .* of forward of a RemoteModule": lambda value: RemoteModule(
        "w1", torch.nn.Identity
    )(1, value),
}


@pytest.mark.parametrize("text", CALLS_WITH_ARGUMENTS)
def test_an_argument_that_can_not_be_sent_is_the_users(pair: list[Agent], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        CALLS_WITH_ARGUMENTS[text](Unsendable())


class Silent:
    """A callable without a name, whose `repr` is code of the user."""

    def __repr__(self) -> str:
        raise AssertionError("code of the user ran for a message")

    def __call__(self) -> None: ...

    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def test_no_code_of_the_user_runs_for_the_name_of_a_callee(pair: list[Agent]) -> None:
    with pytest.raises(TypeError, match="Silent"):
        rpc.rpc_sync("w1", Silent())
