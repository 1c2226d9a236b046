"""References that follow (`follow=True`): whatever takes one follows, too, or refuses it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import farcall
import farcall.autograd as dist_autograd
from behaviour.helpers import wait_until
from farcall import rpc
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


def here() -> str:
    return rpc.get_worker_info().name


class Thing(nn.Linear):
    """An object that says where it was made, in all the ways in which it is asked."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.made_on = here()

    def where(self) -> str:
        return here()

    def forward(self, _: torch.Tensor) -> Any:
        return here()

    def __repr__(self) -> str:
        return here()

    def __len__(self) -> int:
        return int(here()[1:])

    def __iter__(self) -> Iterator[str]:
        return iter([here()])

    def __getitem__(self, _: object) -> str:
        return here()

    def __contains__(self, place: object) -> bool:
        return place == here()


def make_loss() -> torch.Tensor:
    return torch.ones(1, requires_grad=True).sum()


def local_value(follower: Any) -> str:
    return follower.local_value().made_on  # type: ignore[no-any-return]


def name_if_owner(follower: Any) -> str:
    return here() if follower.is_owner() else "elsewhere"


def where_by(follower: Any) -> str:
    return follower.rpc_sync().where()  # type: ignore[no-any-return]


def where_by_handle(handle: Any) -> str:
    assert isinstance(handle, farcall.Handle)
    return handle.where.sync()  # type: ignore[no-any-return]


async def attribute_of(handle: Any) -> Any:
    return await handle.made_on


def backward(follower: Any) -> str:
    with dist_autograd.context() as context:
        follower.backward(context)
    return follower.owner_name()  # type: ignore[no-any-return]


def confirmed(follower: Any) -> str:
    follower.to_here()
    wait_until(follower.confirmed_by_owner)
    return follower.owner_name()  # type: ignore[no-any-return]


def type_of(follower: Any) -> str:
    assert follower._get_type() is Thing
    return follower._get_type(blocking=False).wait() is Thing and follower.owner_name()


def killed(follower: Any) -> str:
    name = follower.owner_name()
    rpc.kill(follower)
    with pytest.raises(rpc.Cancelled):
        follower.to_here()
    return name  # type: ignore[no-any-return]


def module(follower: Any) -> Callable[[], Any]:
    made = RemoteModule.init_from_module_rref("w1", follower)
    assert made(torch.ones(1)) == "w1"

    def use() -> str:
        assert made.forward_async(torch.ones(1)).wait() == made.on == "w2"
        assert len(list(made.parameters())) == 2
        return made(torch.ones(1))  # type: ignore[no-any-return]

    return use


def handle_of(use: Callable[[Any], Any]) -> Callable[[Any], Callable[[], Any]]:
    def prepare(follower: Any) -> Callable[[], Any]:
        handle = farcall.handle(follower)
        return lambda: use(handle)

    return prepare


def kept(get: Callable[[Any], Any], use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a part of a reference or a handle that is kept in a variable."""

    def prepare(follower: Any) -> Callable[[], Any]:
        part = get(follower)
        return lambda: use(part)

    return prepare


# Each is given a reference when the object is on w1, and says "w2" when it is there.
FOLLOW: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "RRef.to_here": kept(lambda f: f.to_here, lambda to_here: to_here().made_on),
    "RRef.local_value": lambda f: lambda: rpc.rpc_sync("w2", local_value, args=(f,)),
    "RRef.is_owner": lambda f: lambda: rpc.rpc_sync("w2", name_if_owner, args=(f,)),
    "RRef.owner": lambda f: lambda: f.owner().name,
    "RRef.owner_name": kept(lambda f: f.owner_name, lambda owner_name: owner_name()),
    "RRef.confirmed_by_owner": lambda f: lambda: confirmed(f),
    "RRef.rpc_sync": kept(lambda f: f.rpc_sync(), lambda proxy: proxy.where()),
    "RRef.rpc_sync(retry)": kept(lambda f: f.rpc_sync(retry=1), lambda proxy: proxy.where()),
    "RRef.rpc_sync().method": kept(lambda f: f.rpc_sync().where, lambda method: method()),
    "RRef.rpc_async": kept(lambda f: f.rpc_async(), lambda proxy: proxy.where().wait()),
    "RRef.rpc_async().method": kept(lambda f: f.rpc_async().where, lambda method: method().wait()),
    "RRef.remote": kept(lambda f: f.remote(), lambda proxy: proxy.where().to_here()),
    "RRef.remote().method": kept(lambda f: f.remote().where, lambda method: method().to_here()),
    "RRef.backward": lambda f: lambda: backward(f),
    "RRef._get_type": lambda f: lambda: type_of(f),
    "rpc.kill": lambda f: lambda: killed(f),
    "rpc.rpc_sync": lambda f: lambda: rpc.rpc_sync("w2", where_by, args=(f,)),
    "farcall.handle": handle_of(lambda h: h.where().wait()),
    "handle of a handle": lambda f: kept(farcall.handle, lambda h: h.where.sync())(
        farcall.handle(f)
    ),
    "handle.method": kept(lambda f: farcall.handle(f).where, lambda member: member().wait()),
    "handle.method.sync": kept(lambda f: farcall.handle(f).where.sync, lambda sync: sync()),
    "handle.attribute.get": kept(lambda f: farcall.handle(f).made_on.get, lambda get: get()),
    "await handle.attribute": handle_of(lambda h: asyncio.run(attribute_of(h))),
    "handle.call": handle_of(lambda h: h.call(Thing.where).wait()),
    "handle.call of a dunder": handle_of(lambda h: h.call(Thing.__repr__).wait()),
    "handle.rpc_sync(retry)": handle_of(lambda h: h.rpc_sync(retry=1).where()),
    "handle.rpc_async(retry)": handle_of(lambda h: h.rpc_async(retry=1).where().wait()),
    "handle.remote": handle_of(lambda h: h.remote().where().to_here()),
    "handle.to_here": handle_of(lambda h: h.to_here().made_on),
    "handle.owner": handle_of(lambda h: h.owner().name),
    "handle.confirmed_by_owner": handle_of(confirmed),
    "handle.backward": handle_of(backward),
    "handle._get_type": handle_of(type_of),
    "handle, killed": handle_of(killed),
    "len(handle)": handle_of(lambda h: f"w{len(h)}"),
    "iter(handle)": handle_of(lambda h: next(iter(h))),
    "handle[key]": handle_of(lambda h: h[0]),
    "in handle": handle_of(lambda h: "w2" if "w2" in h else "elsewhere"),
    "handle as an argument": handle_of(lambda h: rpc.rpc_sync("w2", where_by_handle, args=(h,))),
    "RemoteModule.init_from_module_rref": module,
    "RemoteModule of a handle": lambda f: module(farcall.handle(f)),
}
REFUSE: dict[str, Callable[[Any], Any]] = {
    "DistributedOptimizer": lambda f: DistributedOptimizer(torch.optim.SGD, [f], lr=0.1),
    "DistributedOptimizer of one": lambda f: DistributedOptimizer(
        torch.optim.SGD, [{"params": f}], lr=0.1
    ),
    "DistributedOptimizer of pairs": lambda f: DistributedOptimizer(
        torch.optim.SGD, [("weight", f)], lr=0.1
    ),
    "DistributedOptimizer of groups": lambda f: DistributedOptimizer(
        torch.optim.SGD, [{"params": [f]}], lr=0.1
    ),
    "DistributedOptimizer of a handle": lambda f: DistributedOptimizer(
        torch.optim.SGD, [farcall.handle(f)], lr=0.1
    ),
    "DistributedOptimizer of LBFGS": lambda f: DistributedOptimizer(torch.optim.LBFGS, [f]),
    "DistributedOptimizer.add_param_group": lambda f: DistributedOptimizer(
        torch.optim.SGD, [rpc.RRef(torch.ones(1, requires_grad=True))], lr=0.1
    ).add_param_group({"params": [f]}),
}


@pytest.mark.parametrize("transport", ["inproc"])
@pytest.mark.parametrize("use", FOLLOW)
def test_whatever_takes_a_following_reference_follows(trio: list[Agent], use: str) -> None:
    factory: Any = make_loss if "backward" in use else Thing
    follower = rpc.supervise(factory, on="w1", name="it", follow=True)
    ask = FOLLOW[use](follower)
    trio[1].close()
    wait_until(lambda: follower.owner_name() == "w2")
    assert ask() == "w2"


@pytest.mark.parametrize("transport", ["inproc"])
@pytest.mark.parametrize("use", REFUSE)
def test_functions_that_can_not_follow_refuse_a_following_reference(
    pair: list[Agent], use: str
) -> None:
    follower = rpc.supervise(make_loss, on="w1", name="it", follow=True)
    with pytest.raises(TypeError, match=r"follows a supervised object: .*'it'"):
        REFUSE[use](follower)


MODULES = ("farcall", "farcall.rpc", "farcall.autograd", "farcall.nn", "farcall.optim")


def takers() -> Iterator[str]:
    """Yield the names of the public functions and methods that take a reference."""
    for name, _ in inspect.getmembers(rpc.RRef, callable):
        if (name[0] != "_" and name != "of") or name == "_get_type":  # `of` makes one
            yield f"RRef.{name}"
    for module in map(import_module, MODULES):
        for name in dir(module):
            public = getattr(module, name)
            functions = [(name, public)]
            if inspect.isclass(public) and public.__module__.startswith("farcall"):
                functions += [
                    (f"{name}.{method}", getattr(public, method))
                    for method in vars(public)
                    if method[0] != "_"
                ]
            for called, function in functions:
                if takes_reference(function):
                    yield called


def takes_reference(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return any(
        "rref" in parameter.name or "RRef" in str(parameter.annotation)
        for parameter in parameters.values()
    )


def test_the_sweep_has_all_that_takes_references() -> None:
    tried = {use.removeprefix("farcall.").removeprefix("rpc.") for use in [*FOLLOW, *REFUSE]}
    assert set(takers()) <= tried, set(takers()) - tried
    assert {"handle", "kill", "DistributedOptimizer"} <= set(takers())  # it finds some


def test_handle_of_a_following_reference_travels_and_says_what_it_is(trio: list[Agent]) -> None:
    handle = farcall.handle(rpc.supervise(Thing, on="w1", name="it", follow=True))
    assert repr(handle) == "<handle of FollowingRRef('it')>"
    assert "where" in dir(handle)
    assert rpc.rpc_sync("w2", where_by_handle, args=(handle,)) == "w1"
    back = rpc.rpc_sync("w2", lambda it: it, args=(handle,))
    assert type(back) is type(handle)
    trio[1].close()
    with acting_as(trio[0]):
        wait_until(lambda: back.owner_name() == "w2")
        assert back.where.sync() == "w2"


@pytest.mark.parametrize("transport", ["inproc"])
def test_handle_that_follows_reaches_workers_with_a_policy(
    start: Callable[..., list[Agent]],
) -> None:
    listed = rpc.Only(
        functions=[Thing, Thing.where, where_by_handle, rpc.supervise, rpc.get_object]
    )
    start(2, policies={"w1": listed})
    handle = farcall.handle(rpc.supervise(Thing, on="w1", name="it", follow=True))
    assert rpc.rpc_sync("w1", where_by_handle, args=(handle,)) == "w1"
