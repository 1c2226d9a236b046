"""`torch.compile` breaks its graph around farcall, and gives what uncompiled code gives."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo

from behaviour.standing_in import standing_in, stands_in
from farcall import autograd, rpc
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent
from farcall.runtime.graph_breaks import MARK

MODULES = ("farcall.rpc", "farcall.autograd", "farcall.nn", "farcall.optim")
COMPAT = ("farcall.compat.rpc", "farcall.compat.rpc.api", "farcall.compat.autograd")


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
def test_compiled_code_gives_what_it_gives_uncompiled(
    pair: list[Agent], program: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    torch._dynamo.reset()
    value = torch.ones(2)
    expected = torch.full((2,), 5.0)
    assert torch.equal(program(value), expected)
    compiled = torch.compile(program, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(value), expected)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("transport", ["native"])
def test_compiled_code_gives_what_it_gives_uncompiled_with_compat(
    pair: list[Agent], program: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with stands_in(pair, sys.modules[__name__]):
        test_compiled_code_gives_what_it_gives_uncompiled(pair, program)


def entries() -> dict[str, Any]:
    """All functions that users may call, by name."""
    found: dict[str, Any] = {}
    for module in (*MODULES, *COMPAT):
        for name in import_module(module).__all__:
            entry = getattr(import_module(module), name)
            if inspect.isfunction(entry):
                found[f"{module}.{name}"] = entry
            elif inspect.isclass(entry) and has_to_break(entry):
                for attribute, member in vars(entry).items():
                    if isinstance(member, FunctionType):
                        found[f"{module}.{name}.{attribute}"] = member
    return found


def has_to_break(cls: type) -> bool:
    """Not the classes whose instances are plain data."""
    is_data = issubclass(cls, BaseException) or cls.__name__.endswith(("Options", "Info", "Type"))
    return not is_data


@pytest.mark.parametrize("entry", entries().values(), ids=entries())
def test_every_entry_is_marked(entry: Any) -> None:
    assert getattr(inspect.unwrap(entry), MARK, False)


@pytest.mark.parametrize("cls", [rpc.RRef, rpc.Future])
@pytest.mark.parametrize("transport", ["native"])
def test_what_compat_puts_into_classes_is_marked(pair: list[Agent], cls: type) -> None:
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
