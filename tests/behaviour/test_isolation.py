"""Settings that one remote function makes in its thread: no other and no callback sees them."""

from __future__ import annotations

import ctypes
import ctypes.util
import decimal
import platform
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from behaviour.helpers import Gate, in_threads, wait_at, wait_until
from farcall import autograd, rpc
from farcall.runtime.agent import Agent
from farcall.runtime.threads import isolation, thread_state

variable: ContextVar[str] = ContextVar("variable", default="unset")


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def enter(manager: Any) -> None:
    """Enter a context, never leave it, and keep it, so that its end does not leave it either.

    Also at the end of the process: some guards write to the memory of the thread that entered them.
    """
    manager.__enter__()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(manager))


def device_types() -> list[str]:
    """Return the types of devices that have autocast, by torch's own list."""
    names = []
    for label in torch._C._autograd.DeviceType.__members__:
        name = "privateuseone" if label == "PrivateUse1" else label.lower()
        if label not in ("MKLDNN", "Metal") and torch._C._is_autocast_available(name):
            names.append(name)
    return names


AUTOCAST = device_types()
DTYPES = {device: torch.get_autocast_dtype(device) for device in AUTOCAST}


def another(device: str) -> torch.dtype:
    return torch.bfloat16 if DTYPES[device] is torch.float16 else torch.float16


def round_down() -> None:
    modes = {"x86_64": 0x400, "aarch64": 0x800000}  # FE_DOWNWARD
    ctypes.CDLL(ctypes.util.find_library("m")).fesetround(modes[platform.machine()])


def trace_on() -> None:
    """Go on with the state of a trace of torch.jit that has ended."""
    states = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        states.append(torch._C._get_tracing_state())
        return x + 1

    torch.jit.trace(traced, torch.ones(1), check_trace=False)
    torch._C._set_tracing_state(states[0])


def ignore(*_: Any) -> None:
    """Do nothing: for traces, profiles and callbacks."""


C: Any = torch._C
FORWARD_MODE: dict[str, Callable[[], Any]] = {
    "_set_fwd_grad_enabled": lambda: C._set_fwd_grad_enabled(False),
    "forward_ad": lambda: enter(torch.autograd.forward_ad._set_fwd_grad_enabled(False)),
}
HOOKS: dict[str, Callable[[], Any]] = {
    "saved_tensors_hooks": lambda: enter(
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    ),
    "disable_saved_tensors_hooks": lambda: enter(
        torch.autograd.graph.disable_saved_tensors_hooks("not here")
    ),
    "pushed and disabled": lambda: (
        C._autograd._push_saved_tensors_default_hooks(lambda x: x, lambda x: x),
        C._autograd._saved_tensors_hooks_disable("not here", False),
    ),
    "hooks traced": lambda: C._autograd._saved_tensors_hooks_set_tracing(True),
    "save_on_cpu": lambda: enter(torch.autograd.graph.save_on_cpu()),
}
KEYS: dict[str, Callable[[], Any]] = {
    "below autograd": lambda: enter(C._AutoDispatchBelowAutograd()),
    "excluded key": lambda: C._dispatch_tls_set_dispatch_key_excluded(
        C.DispatchKey.AutogradCPU, True
    ),
    "included key": lambda: C._dispatch_tls_set_dispatch_key_included(C.DispatchKey.Meta, True),
    "vmap": lambda: C._functorch._vmap_increment_nesting(2, "error"),
    "grad levels": lambda: [C._functorch._grad_increment_nesting() for _ in range(3)],
    "jvp": C._functorch._jvp_increment_nesting,
    "functionalize": lambda: C._functorch._func_increment_nesting(True),
}
AUTOCASTS: dict[str, Callable[[], Any]] = {
    **{f"autocast {name}": lambda x=name: torch.set_autocast_enabled(x, True) for name in AUTOCAST},
    **{
        f"autocast dtype {name}": lambda x=name: torch.set_autocast_dtype(x, another(x))
        for name in AUTOCAST
    },
    "autocast nesting": torch.autocast_increment_nesting,
    "autocast left too often": torch.autocast_decrement_nesting,
}
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
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda: torch._C._set_view_replay_enabled(True),
    "context variable": lambda: variable.set("set"),
    "decimal": lambda: setattr(decimal.getcontext(), "prec", 3),
    "numpy": lambda: np.seterr(divide="raise"),
    "set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "rounding": round_down,
    "jit optimization": lambda: C._set_graph_executor_optimize(False),
    "jit tracing": trace_on,
    "settrace": lambda: sys.settrace(ignore),
    "setprofile": lambda: sys.setprofile(ignore),
    **FORWARD_MODE,
    **HOOKS,
    **KEYS,
    **AUTOCASTS,
}


def nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def are_hooks_traced() -> bool:
    was_on = C._autograd._saved_tensors_hooks_set_tracing(False)
    C._autograd._saved_tensors_hooks_set_tracing(was_on)
    return bool(was_on)


def probe() -> dict[str, Any]:
    one, third = torch.ones(1, dtype=torch.float64).item(), 3.0
    return {
        "denormal": (torch.tensor([1e-39]) * 1.0).item(),
        "python's denormal": 5e-324 * one,
        "rounding": one / third,
        "forward mode": C._is_fwd_grad_enabled(),
        "hooks enabled": C._autograd._saved_tensors_hooks_is_enabled(),
        "hooks traced": are_hooks_traced(),
        "included": C._dispatch_tls_local_include_set().raw_repr(),
        "excluded": C._dispatch_tls_local_exclude_set().raw_repr(),
        "levels": C._functorch.peek_interpreter_stack() is None,
        "jit": C._get_graph_executor_optimize(),
        "jit tracing": C._get_tracing_state() is None,
        "nesting": nesting(),
        "autocasts": [torch.is_autocast_enabled(device) for device in AUTOCAST],
        "dtypes": [torch.get_autocast_dtype(device) for device in AUTOCAST],
        "trace": sys.gettrace(),
        "profile": sys.getprofile(),
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
    """Set the name in a callback, which a thread of the agent that gets the answer runs."""
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
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use either of the two ways to find out whether something was set."""
    if request.param == "asking torch":
        monkeypatch.setattr(thread_state, "ThreadState", None)
    return str(request.param)


@pytest.mark.skipif(thread_state.ThreadState is None, reason="nothing was compiled")
def test_where_torch_keeps_its_state_is_found() -> None:
    """Find the state, or torch is asked each time, which is slower. A new torch may change that."""
    state = thread_state.Restorer(thread_state.float_control()).state
    assert isinstance(state, thread_state.ThreadState)
    assert 0 < state.watched_bytes <= 1024
    assert not state.has_changed()


# Code of the user that is no function which was called, nor a callback of a future.

released: list[str] = []


class Released:
    """Sets something when it is collected."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        set_it(self.name)
        released.append(self.name)


seen_by_finalizers: list[dict[str, Any]] = []


class Sees:
    """Looks at the settings when it is collected, and sets something."""

    def __del__(self) -> None:
        seen_by_finalizers.append(probe())
        set_it("context variable")
        set_it("set_grad_enabled")


class Rebuilt:
    """Sets something when it is unpickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return rebuild, (self.name,)


class Reduced:
    """Sets something when it is pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        set_it(self.name)
        return int, ()


class Collected:
    """Its copy sets something when it is collected, in whichever thread that is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return Released, (self.name,)


def collected_after(gate: Gate, name: str) -> Collected:
    gate.wait()
    return Collected(name)


class RaisesWhenRebuilt(Exception):
    def __reduce__(self) -> Any:
        return rebuild_error, self.args


def rebuild(name: str) -> str:
    set_it(name)
    return name


def rebuild_error(name: str) -> RaisesWhenRebuilt:
    set_it(name)
    return RaisesWhenRebuilt(name)


def fail_with(name: str) -> None:
    raise RaisesWhenRebuilt(name)


def wait_until_released(name: str) -> None:
    wait_until(lambda: name in released)
    released.clear()


def by_argument(name: str) -> None:
    rpc.rpc_sync("w1", id, args=(Rebuilt(name),))


def by_pickled_result(name: str) -> None:
    rpc.rpc_sync("w1", Reduced, args=(name,))


def by_answer(name: str) -> None:
    """Have a thread of the agent unpickle an answer, since no thread waits for it."""
    assert rpc.rpc_async("w1", Rebuilt, args=(name,)).wait() == name


def by_error(name: str) -> None:
    with pytest.raises(RaisesWhenRebuilt):
        rpc.rpc_async("w1", fail_with, args=(name,)).wait()


def by_release(name: str) -> None:
    reference = rpc.remote("w1", Released, args=(name,))
    reference.rpc_sync().__sizeof__()
    del reference
    wait_until_released(name)


def by_dropped_answer(name: str) -> None:
    """Drop the future, so that its value ends in the thread that completes it."""
    gate = Gate()
    rpc.rpc_async("w1", collected_after, args=(gate, name))
    gate.open()
    wait_until_released(name)


def by_dropped_callback(name: str) -> None:
    """Let the objects that a callback refers to end with it."""
    gate = Gate()
    future = rpc.rpc_async("w1", wait_at, args=(gate,))
    future.add_done_callback(partial(ignore, Released(name)))
    del future  # so that a thread of the agent has the last reference to the callback
    gate.open()
    wait_until_released(name)


def check_neighbours(name: str) -> None:
    """Let the first of two callbacks of a future set something."""
    with in_threads(probe) as expected:
        pass
    gate = Gate()  # a callback that is added to a future which is done runs here
    future = rpc.rpc_async("w1", wait_at, args=(gate,))
    future.then(lambda _: set_it(name))
    seen = future.then(lambda _: probe())
    gate.open()
    assert seen.wait() == expected[0]


WAYS = (by_call, by_failure, by_remote, by_continuation, by_callback, by_self_call, by_backward)


# One pair of workers for all names: the threads of their agents see each of them set.
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_state_that_a_function_sets_no_other_sees(
    check: str, pair: list[Agent], way: Callable[[str], None]
) -> None:
    with in_threads(probe) as expected:
        pass  # what a new thread has
    # Python alone can't set how floats are rounded.
    left_out = {"rounding"} if check == "asking torch" else set()
    for name in [name for name in SETTERS if name not in left_out]:
        way(name)
        if "anomaly" in name:  # of the process; put back when a callback or backward function ends
            wait_until(lambda: not torch.is_anomaly_enabled())
        assert_nothing_is_set(expected[0], name)


def assert_nothing_is_set(expected: dict[str, Any], name: str) -> None:
    for to in ("w1", "w0"):
        for _ in range(4):
            assert rpc.rpc_sync(to, probe) == expected, name
        assert rpc.rpc_async(to, probe).wait() == expected, name
        assert rpc.rpc_sync(to, probe_when_answered) == expected, name


OTHER_WAYS = (
    by_argument,
    by_pickled_result,
    by_answer,
    by_error,
    by_release,
    by_dropped_answer,
    by_dropped_callback,
    check_neighbours,
)
# Of each kind: what a context keeps, what torch keeps, and what the processor keeps.
OF_EACH_KIND = (
    "context variable",
    "decimal",
    "set_grad_enabled",
    "inference_mode",
    "set_default_device",
    "disable_saved_tensors_hooks",
    "set_flush_denormal",
    "function mode",
)


@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.parametrize("transport", ["inproc", "native"])
def test_state_that_other_code_of_the_user_sets_no_function_sees(
    check: str, pair: list[Agent], way: Callable[[str], None]
) -> None:
    with in_threads(probe) as expected:
        pass
    here = probe()
    for name in OF_EACH_KIND:
        way(name)
        assert probe() == here, name
        assert_nothing_is_set(expected[0], name)


@pytest.mark.parametrize("name", OF_EACH_KIND)
@pytest.mark.parametrize("transport", ["inproc"])
def test_callbacks_that_wait_for_a_thread_are_isolated_from_each_other(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(pair[0].executor, "may_wait_here", lambda depth: False)
    check_neighbours(name)


@pytest.mark.parametrize("transport", ["native"])
def test_a_tensor_arrives_as_in_a_new_thread(check: str, pair: list[Agent]) -> None:
    for _ in range(5):
        by_dropped_answer("inference_mode")
        assert not rpc.rpc_async("w1", torch.ones, args=(2,)).wait().is_inference()


@pytest.mark.parametrize("transport", ["inproc"])
def test_a_finalizer_does_not_see_the_state_that_another_one_set(pair: list[Agent]) -> None:
    seen_by_finalizers.clear()
    with in_threads(probe) as expected:
        pass
    references = [rpc.remote("w1", Sees) for _ in range(3)]
    for reference in references:
        reference.rpc_sync().__sizeof__()
    del references, reference
    wait_until(lambda: len(seen_by_finalizers) == 3)
    assert seen_by_finalizers == expected * 3


def run_isolated(own: isolation.Isolation, function: Callable[[], None]) -> None:
    """Run a function isolated, as the executor does."""
    own.state.run(own.context, function, own.put_back)


def test_a_thread_that_a_function_starts_computes_as_its_agent_does(check: str) -> None:
    floats = thread_state.float_control()
    seen: list[dict[str, Any]] = []

    def begin() -> None:
        run_isolated(isolation.isolate_thread(floats), lambda: seen.append(probe()))

    def start_another() -> None:
        torch.set_flush_denormal(True)  # which new threads inherit
        with in_threads(begin):
            pass

    with in_threads(start_another):
        pass
    with in_threads(probe) as expected:
        pass
    assert seen == expected


def test_a_debugger_keeps_its_thread(check: str) -> None:
    kept_by: list[Any] = []

    def debugged() -> None:
        own = isolation.isolate_thread(thread_state.float_control())
        sys.setprofile(ignore)
        run_isolated(own, lambda: sys.setprofile(None))
        kept_by.append(sys.getprofile())
        sys.setprofile(None)

    with in_threads(debugged):
        pass
    assert kept_by == [ignore]


def test_every_device_type_with_autocast_is_known() -> None:
    assert list(thread_state.AUTOCAST_DEVICES) == AUTOCAST
