"""What one remote function sets in its thread, no other function and no callback sees."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from behaviour.helpers import in_threads, wait_until
from farcall import autograd, rpc
from farcall.runtime import isolation
from farcall.runtime.agent import Agent

variable: ContextVar[str] = ContextVar("variable", default="unset")
kept: list[Any] = []  # for good: some of torch's guards change the thread in which they end


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def enter(manager: Any) -> None:
    """Enter a context, never leave it, and keep it, so that its end does not leave it either."""
    manager.__enter__()
    kept.append(manager)


SETTERS: dict[str, Callable[[], Any]] = {
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "no_grad": lambda: enter(torch.no_grad()),
    "inference_mode": lambda: enter(torch.inference_mode()),
    "set_default_device": lambda: torch.set_default_device("meta"),
    "device": lambda: enter(torch.device("meta")),
    "both devices": lambda: (torch.set_default_device("meta"), enter(torch.device("cpu"))),
    "autocast": lambda: enter(torch.autocast("cpu", dtype=torch.bfloat16)),
    "set_autocast_enabled": lambda: torch.set_autocast_enabled("cpu", True),
    "set_autocast_dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "set_autocast_cache_enabled": lambda: torch.set_autocast_cache_enabled(False),
    "set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "detect_anomaly": lambda: enter(torch.autograd.detect_anomaly(check_nan=False)),
    "function mode": lambda: enter(Functions()),
    "dispatch mode": lambda: enter(Dispatches()),
    "disabled functions": lambda: enter(torch._C.DisableTorchFunction()),
    "saved_tensors_hooks": lambda: enter(
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    ),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda: torch._C._set_view_replay_enabled(True),
    "context variable": lambda: variable.set("set"),
    "decimal": lambda: setattr(decimal.getcontext(), "prec", 3),
    "numpy": lambda: np.seterr(divide="raise"),
}


def probe() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "graph": (torch.ones(1, requires_grad=True) * 2).requires_grad,
        "inference": torch.is_inference_mode_enabled(),
        "device": torch.ones(1).device.type,
        "default device": str(torch.get_default_device()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "product": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        "cache": torch.is_autocast_cache_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "functions": torch._C._is_torch_function_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(False) is None,
        "multithreading": torch._C._is_multithreading_enabled(),
        "view replay": torch._C._is_view_replay_enabled(),
        "variable": variable.get(),
        "decimal": decimal.getcontext().prec,
        "numpy": np.geterr()["divide"],
    }


def set_it(name: str) -> None:
    SETTERS[name]()


def set_and_fail(name: str) -> None:
    set_it(name)
    raise ValueError(name)


@rpc.functions.async_execution
def set_later(name: str) -> rpc.Future[None]:
    future: rpc.Future[None] = rpc.Future()
    later = future.then(lambda _: set_it(name))
    future.set_result(None)
    return later


@rpc.functions.async_execution
def set_when_answered(name: str) -> rpc.Future[None]:
    """The callback runs in a thread of the agent that receives the answer."""
    return rpc.rpc_async("w0", abs, args=(1,)).then(lambda _: set_it(name))


@rpc.functions.async_execution
def probe_when_answered() -> rpc.Future[Any]:
    return rpc.rpc_async("w0", abs, args=(1,)).then(lambda _: probe())


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        set_it(ctx.name)
        return gradient, None


def by_call(name: str) -> None:
    rpc.rpc_sync("w1", set_it, args=(name,))


def by_failure(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        rpc.rpc_sync("w1", set_and_fail, args=(name,))


def by_remote(name: str) -> None:
    rpc.remote("w1", set_it, args=(name,)).to_here()


def by_continuation(name: str) -> None:
    rpc.rpc_sync("w1", set_later, args=(name,))


def by_callback(name: str) -> None:
    rpc.rpc_sync("w1", set_when_answered, args=(name,))


def by_self_call(name: str) -> None:
    rpc.rpc_sync("w0", set_it, args=(name,))


def by_backward(name: str) -> None:
    with autograd.context() as context:
        value = torch.ones(2, requires_grad=True)
        result = rpc.rpc_sync("w1", Backwards.apply, args=(value, name))
        autograd.backward(context, [result.sum()])


@pytest.fixture(params=["compiled", "asking torch"])
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways to find out whether something was set."""
    if request.param == "asking torch":
        monkeypatch.setattr(isolation, "TorchState", None)


WAYS = (by_call, by_failure, by_remote, by_continuation, by_callback, by_self_call, by_backward)


@pytest.mark.parametrize("name", SETTERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_what_a_function_sets_no_other_sees(
    check: None, pair: list[Agent], way: Callable[[str], None], name: str
) -> None:
    with in_threads(probe) as expected:
        pass  # what a new thread has
    way(name)
    if "anomaly" in name:  # of the process; put back when a callback or backward function has ended
        wait_until(lambda: not torch.is_anomaly_enabled())
    for to in ("w1", "w0"):
        for _ in range(10):
            assert rpc.rpc_sync(to, probe) == expected[0]
        assert rpc.rpc_async(to, probe).wait() == expected[0]
        assert rpc.rpc_sync(to, probe_when_answered) == expected[0]
