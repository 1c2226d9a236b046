"""`torch.compile` breaks its graph around farcall, and gives what uncompiled code gives."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from patience import PATIENCE

import farcall
from behaviour.compiling import quiet_dynamo  # noqa: F401  # a fixture
from behaviour.standing_in import standing_in, stands_in
from farcall import autograd, rpc
from farcall.compat.rpc.quirks import LIKE_TORCH
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent
from farcall.runtime.calls.graph_breaks import MARK

COMPAT = ("farcall.compat.rpc", "farcall.compat.rpc.api", "farcall.compat.autograd")
MODULES = [
    f"farcall.{name}" for name in dir(farcall) if isinstance(getattr(farcall, name), ModuleType)
]
# Classes of plain data, which compiled code may make and read.
PLAIN_DATA = {
    *("Child", "Member", "MemberEvent", "MemberReport", "Retry", "Snapshot"),
    "Only",
    "Secret",
    "TlsConfig",
    *("BackendType", "WorkerInfo", "RpcBackendOptions", "TensorPipeRpcBackendOptions"),
    "ProcessGroupRpcBackendOptions",
}
# Proves that names are found; not all that there are.
SOME = [
    *(("farcall.rpc", "init_rpc"), ("farcall.rpc", "RRef.owner"), ("farcall.rpc", "Future.wait")),
    *(("farcall.functions", "async_execution"), ("farcall.autograd", "backward")),
    *(("farcall.nn", "RemoteModule.forward"), ("farcall.optim", "DistributedOptimizer.step")),
]


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


class AddOne(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + 1


@rpc.functions.async_execution
def double_later(value: torch.Tensor) -> rpc.Future[torch.Tensor]:
    return rpc.rpc_async("w0", double, args=(value,))


@torch.compile(backend="eager")
def compiled_at_the_callee(value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("w0", double, args=(value,)) + 1


def parameter_sum(parameter: rpc.RRef[Any]) -> torch.Tensor:
    return parameter.local_value().sum()


def with_gradients(value: torch.Tensor) -> torch.Tensor:
    leaf = value.clone().requires_grad_()
    with autograd.context() as context:
        loss = rpc.rpc_sync("w1", double, args=(leaf * 2,)).sum()
        autograd.backward(context, [loss])
        gradient = autograd.get_gradients(context)[leaf]
    return gradient + 1


def with_optimizer(value: torch.Tensor) -> torch.Tensor:
    parameter = rpc.remote("w1", torch.nn.Parameter, args=(torch.ones(2),))
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.5)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("w1", parameter_sum, args=(parameter,))])
        optimizer.step(context)
    return value * 10 * parameter.to_here().detach()


def by_future_methods(value: torch.Tensor) -> torch.Tensor:
    seen = []
    future = rpc.rpc_async("w1", double, args=(value * 2,))
    future.add_done_callback(seen.append)
    last = future.then(lambda done: done.wait() + 1)
    last.wait()
    return last.value()


# Each gives 5 for 1.
PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rpc_sync": lambda x: rpc.rpc_sync("w1", double, args=(x * 2,)) + 1,
    "rpc_async": lambda x: rpc.rpc_async("w1", double, args=(x * 2,)).wait() + 1,
    "methods of futures": by_future_methods,
    "remote": lambda x: rpc.remote("w1", double, args=(x * 2,)).to_here() + 1,
    "RRef": lambda x: rpc.RRef(x * 4).local_value() + 1,
    "rpc_sync of a reference": lambda x: rpc.remote("w1", double, (x * 2,)).rpc_sync().add(1),
    "rpc_async of a reference": lambda x: (
        rpc.remote("w1", double, (x * 2,)).rpc_async().add(0).wait() + 1
    ),
    "remote of a reference": lambda x: (
        rpc.remote("w1", double, (x * 2,)).remote().add(0).to_here() + 1
    ),
    "RemoteModule": lambda x: RemoteModule("w1", AddOne)(x * 4),
    "forward": lambda x: RemoteModule("w1", AddOne).forward(x * 4),
    "forward_async": lambda x: RemoteModule("w1", AddOne).forward_async(x * 4).wait(),
    "get_worker_info": lambda x: x * 5 if rpc.get_worker_info().name == "w0" else x,
    "autograd": with_gradients,
    "optimizer": with_optimizer,
    "async_execution": lambda x: rpc.rpc_sync("w1", double_later, args=(x * 2,)) + 1,
    "async_execution here": lambda x: double_later(x * 2).wait() + 1,
    "compiled function": lambda x: rpc.rpc_sync("w1", compiled_at_the_callee, args=(x * 2,)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("transport", ["native"])
def test_compiled_code_gives_the_values_of_uncompiled_code(
    pair: list[Agent], program: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    torch.compiler.reset()
    value = torch.ones(2)
    expected = torch.full((2,), 5.0)
    assert torch.equal(program(value), expected)
    compiled = torch.compile(program, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(value), expected)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("transport", ["native"])
def test_compiled_code_gives_the_values_of_uncompiled_code_with_compat(
    start: Callable[..., list[Agent]], program: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    pair = start(2, quirks=LIKE_TORCH)
    with stands_in(pair, sys.modules[__name__]):
        test_compiled_code_gives_the_values_of_uncompiled_code(pair, program)


MARKED_MEMBERS = (FunctionType, classmethod, staticmethod, property)


def entries() -> dict[str, Any]:
    """Return all functions that users may call, by name."""
    found: dict[str, Any] = {}
    for module in (*MODULES, *COMPAT):
        loaded = import_module(module)
        for name in getattr(loaded, "__all__", vars(loaded)):
            entry = getattr(loaded, name)
            if getattr(entry, "__module__", "farcall").partition(".")[0] != "farcall":
                continue  # what a module without `__all__` has imported
            if inspect.isclass(entry):
                found |= methods(f"{module}.{name}", entry)
            elif callable(entry):
                found[f"{module}.{name}"] = entry
    return found


def methods(path: str, cls: type) -> dict[str, Any]:
    """Return the methods that a class defines, if its instances are more than plain data."""
    if issubclass(cls, BaseException) or cls.__name__ in PLAIN_DATA:
        return {}
    return {
        f"{path}.{name}": part
        for name, member in vars(cls).items()
        if isinstance(member, MARKED_MEMBERS)
        for part in parts(member)
    }


def parts(member: Any) -> list[Any]:
    if isinstance(member, property):
        return [one for one in (member.fget, member.fset, member.fdel) if one is not None]
    return [getattr(member, "__func__", member)]


def is_marked(entry: Any) -> bool:
    return bool(getattr(inspect.unwrap(entry), MARK, False))


@pytest.mark.parametrize("entry", entries().values(), ids=entries())
def test_every_entry_is_marked(entry: Any) -> None:
    assert is_marked(entry)


def test_all_public_modules_are_looked_at() -> None:
    public = {name for name in dir(farcall) if not name.startswith("_")}
    others = [getattr(farcall, name) for name in public if f"farcall.{name}" not in MODULES]
    assert all(is_marked(one) for one in others if not inspect.isclass(one))
    assert {f"{module}.{name}" for module, name in SOME} <= entries().keys()


def test_a_new_name_without_a_graph_break_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class New:
        def method(self) -> None: ...

        @property
        def value(self) -> int:
            return 1

        @classmethod
        def make(cls) -> None: ...

    def new() -> None: ...

    for made in (New, new):
        made.__module__ = "farcall.rpc"
        monkeypatch.setattr(rpc, made.__name__, made, raising=False)
        monkeypatch.setattr(rpc, "__all__", [*rpc.__all__, made.__name__])
    found = {name for name, entry in entries().items() if not is_marked(entry)}
    of_class = {f"farcall.rpc.New.{name}" for name in ("method", "value", "make")}
    assert found == {"farcall.rpc.new", *of_class}


LIFE_OF_AN_AGENT = """
import asyncio, sys, torch
from farcall import rpc

def double(value):
    return value * 2

def live(value):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    result = rpc.rpc_sync("w0", double, args=(value * 2,)) + 1
    rpc.shutdown()
    return result * 2

def start(value):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    return value + 1

def stop(value):
    rpc.shutdown(graceful=True, timeout=0)
    return value + 1

def mark(value):
    marked = rpc.functions.async_execution(double)
    return marked(value) + 1

async def wait(value):
    return await rpc.rpc_async("w0", double, args=(value * 2,)) + 1

@torch.compile(backend="eager")
def begin(value):
    return [rpc.rpc_async("w0", double, args=(value + 1,)) for _ in range(3)]

async def gather(value):
    return sum(await asyncio.gather(*begin(value)))

# torch 2.13 can't break a graph inside of a coroutine, whatever the coroutine calls.
@torch.compiler.disable
def wait_for(value):
    return asyncio.run(wait(value))

def run(value):
    return wait_for(value) * 2

one = torch.ones(2)
for _ in range(2):
    assert torch.equal(torch.compile(live, backend="eager")(one), one * 10)
assert torch.equal(torch.compile(mark, backend="eager")(one), one * 3)
for _ in range(2):
    assert torch.equal(torch.compile(start, backend="eager")(one), one * 2)
    for _ in range(2):
        assert torch.equal(torch.compile(run, backend="eager")(one), one * 10)
        assert torch.equal(asyncio.run(gather(one)), one * 12)
    assert torch.equal(torch.compile(stop, backend="eager")(one), one * 2)
"""


def test_init_rpc_shutdown_and_await_run_compiled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIFE_OF_AN_AGENT, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cls", [rpc.RRef, rpc.Future])
@pytest.mark.parametrize("transport", ["native"])
def test_methods_that_compat_puts_into_classes_are_marked(pair: list[Agent], cls: type) -> None:
    before = dict(vars(cls))
    with standing_in(pair):
        replaced = {key: value for key, value in vars(cls).items() if before.get(key) != value}
    assert replaced
    plain = {key: getattr(value, "__func__", value) for key, value in replaced.items()}
    assert [key for key, value in plain.items() if not getattr(value, MARK, False)] == []


def test_importing_farcall_does_not_import_dynamo() -> None:
    names = ", ".join(MODULES)
    code = f"import sys, {names}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
