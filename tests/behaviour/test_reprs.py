"""`repr` of what farcall's functions return and its classes make says what it is: no address."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch

from behaviour.helpers import wait_until
from behaviour.standing_in import standing_in
from farcall import autograd, optim, rpc, testing
from farcall.compat import autograd as compat_autograd
from farcall.compat.rpc import api
from farcall.functions import async_execution
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent


class Config:
    pass


MODULES = ("autograd", "functions", "nn", "optim", "rpc", "testing")


KEPT: list[Any] = []  # objects with names


def linear() -> Any:
    return rpc.remote("w1", torch.nn.Linear, args=(1, 1))


def named(name: str) -> str:
    """Return the name of an object that there is."""
    made = rpc.remote("w1", torch.nn.Linear, args=(1, 1), name=name)
    KEPT.append(made)
    made.rpc_sync().extra_repr()  # waits until it is made
    return name


def module() -> RemoteModule:
    return RemoteModule("w1", torch.nn.Linear, args=(1, 1))


def optimizer() -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD, module().remote_parameters(), lr=0.5)


def entered(read: Callable[[int], Any]) -> Any:
    with autograd.context() as context:
        return read(context)


def context_left() -> Any:
    context = autograd.context()
    with context:
        return context


# By the public name that gives the object, and what else is said of it.
OBJECTS: dict[str, Callable[[], Any]] = {
    "autograd.backward": lambda: None,
    "autograd.context": autograd.context,
    "autograd.context left": context_left,
    "autograd.get_gradients": lambda: entered(autograd.get_gradients),
    "functions.async_execution": lambda: async_execution(linear)().owner(),
    "nn.RemoteModule": module,
    "nn.RemoteModule parameters": lambda: module().remote_parameters(),
    "nn.RemoteModule reference": lambda: module().get_module_rref(),
    "nn.RemoteModule future": lambda: module().forward_async(torch.ones(1)),
    "optim.TYPES": lambda: optim.TYPES,
    "optim.DistributedOptimizer": optimizer,
    "optim.DistributedOptimizer state": lambda: optimizer().state_dict(),
    "rpc.BackendType": lambda: list(rpc.BackendType),
    "rpc.Future": rpc.Future,
    "rpc.Future chained": lambda: rpc.rpc_async("w1", abs, args=(-1,)).then(lambda done: 1),
    "rpc.Member": lambda: rpc.workers()[0],
    "rpc.MemberEvent": lambda: rpc.MemberEvent("joined", rpc.Member("w9", 9, "ps")),
    "rpc.MemberReport": lambda: rpc.explain("w0"),
    "rpc.explain": lambda: rpc.explain("w1", measure=True),
    "rpc.Membership": rpc.membership,
    "rpc.Subscription": lambda: rpc.on_leave(print),
    "rpc.membership": rpc.membership,
    "rpc.all_gather": lambda: rpc.all_gather(1, ["w0"]),
    "rpc.gather": lambda: rpc.gather(1, "w0", ["w0"]),
    "rpc.cancelled": rpc.cancelled,
    "rpc.Child": lambda: rpc.Child(Config, on="w1", snapshot=rpc.Snapshot(5.0)),
    "rpc.Retry": lambda: rpc.Retry(3),
    "rpc.Snapshot": lambda: rpc.Snapshot(5.0, "state_dict", "load_state_dict"),
    "rpc.supervise": lambda: rpc.supervise(torch.nn.Linear, (1, 1), on="w1", name="a", follow=True),
    "rpc.supervise call": lambda: (
        rpc.supervise(torch.nn.Linear, (1, 1), on="w1", name="b", follow=True).rpc_async().forward
    ),
    "rpc.supervise proxy": lambda: rpc.supervise(
        torch.nn.Linear, (1, 1), on="w1", name="c", follow=True
    ).rpc_async(),
    "rpc.get_object": lambda: rpc.get_object(named("it")),
    "rpc.on_join": lambda: rpc.on_join(linear),
    "rpc.on_leave": lambda: rpc.on_leave(print),
    "rpc.wait_for": lambda: rpc.wait_for("w1"),
    "rpc.workers": rpc.workers,
    "rpc.ProcessGroupRpcBackendOptions": rpc.ProcessGroupRpcBackendOptions,
    "rpc.Only": lambda: rpc.Only([linear, "torch:add"], [Config]),
    "rpc.RRef": lambda: rpc.RRef(5),
    "rpc.RRef of another": linear,
    "rpc.RRef rpc_sync": lambda: linear().rpc_sync(),
    "rpc.RRef rpc_async": lambda: linear().rpc_async(timeout=0),
    "rpc.RRef remote": lambda: linear().remote(),
    "rpc.RRef method": lambda: linear().rpc_sync().forward,
    "rpc.RpcBackendOptions": rpc.RpcBackendOptions,
    "rpc.RpcBackendOptions with a store": lambda: rpc.RpcBackendOptions(
        store=torch.distributed.HashStore()  # type: ignore[attr-defined]
    ),
    "rpc.Secret": rpc.Secret.generate,
    "rpc.TlsConfig": lambda: rpc.TlsConfig("w0.pem", "w0.key", "ca.pem"),
    "rpc.TensorPipeRpcBackendOptions": rpc.TensorPipeRpcBackendOptions,
    "rpc.WorkerInfo": lambda: rpc.WorkerInfo("w5", 5),
    "rpc.get_worker_info": rpc.get_worker_info,
    "rpc.remote": linear,
    "rpc.rpc_async": lambda: rpc.rpc_async("w1", abs, args=(-1,)),
    "rpc.rpc_sync": lambda: rpc.rpc_sync("w1", abs, args=(-1,)),
    "testing.ManualClock": testing.ManualClock,
    "testing.Faults": testing.Faults,
    "testing.Network": lambda: testing.Network(testing.ManualClock(), Random(0), testing.Faults()),
}
# Or functions.
GIVES_NOTHING = {"barrier", "kill", "init_rpc", "shutdown", "functions", "FUNCTIONS"}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("transport", ["native"])
def test_no_repr_is_an_address(pair: list[Agent], name: str) -> None:
    shown = repr(OBJECTS[name]())
    assert " object at " not in shown
    assert "0x" not in shown


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_that_gives_an_object_is_looked_at(module: str) -> None:
    loaded = import_module(f"farcall.{module}")
    public = {name for name in loaded.__all__ if name not in GIVES_NOTHING}
    errors = {
        name
        for name in public
        if inspect.isclass(cls := getattr(loaded, name)) and issubclass(cls, BaseException)
    }
    looked_at = {name.partition(".")[2].split()[0] for name in OBJECTS if name.startswith(module)}
    assert looked_at == public - errors


@pytest.mark.parametrize("transport", ["native"])
def test_no_repr_of_compats_objects_is_an_address(pair: list[Agent]) -> None:
    with standing_in(pair), autograd.context() as context:
        agent = api._get_current_rpc_agent()
        assert repr(agent) == "<TensorPipeAgent of 'w0' (rank 0)>"
        assert (
            repr(compat_autograd._retrieve_context(context)) == f"<DistAutogradContext {context}>"
        )
        for shown in (agent.get_worker_infos(), agent._get_backend_options(), linear().rpc_sync()):
            assert "0x" not in repr(shown)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("transport", ["native"])
def test_repr_of_a_proxy_says_which_and_of_what(pair: list[Agent], way: str) -> None:
    rref = linear()
    wait_until(rref.confirmed_by_owner)  # which changes its repr
    assert repr(getattr(rref, way)()) == f"<rref.{way}() of {rref!r}>"
