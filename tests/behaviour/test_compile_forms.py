"""`torch.compile` of code that uses farcall's objects, wherever it has them from."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from behaviour.compiling import quiet_dynamo  # noqa: F401  # a fixture
from behaviour.standing_in import stands_in
from farcall import autograd, rpc
from farcall.compat.rpc.quirks import LIKE_TORCH
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.runtime.agent import Agent

Make = Callable[[], Any]
Use = Callable[[Any, torch.Tensor], Any]
Program = Callable[[torch.Tensor], Any]


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((2,), 3.0), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor

    def __len__(self) -> int:
        return 2


def scale() -> Any:
    return rpc.remote("w1", Scale)


def future() -> Any:
    return rpc.rpc_async("w1", torch.full, args=((2,), 3.0))


def module() -> Any:
    return RemoteModule("w1", Scale)


def factor_sum(module: Any) -> torch.Tensor:
    return module.local_value().factor.sum()


class Trained:
    """A parameter of w1, and its optimizer."""

    def __init__(self) -> None:
        self.parameter = rpc.remote("w1", torch.nn.Parameter, args=(torch.ones(2),))
        self.optimizer = DistributedOptimizer(torch.optim.SGD, [self.parameter], lr=0.5)


def parameter_sum(parameter: Any) -> torch.Tensor:
    return parameter.local_value().sum()


def step(trained: Trained, value: torch.Tensor) -> torch.Tensor:
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("w1", parameter_sum, args=(trained.parameter,))])
        trained.optimizer.step(context)
    return trained.parameter.to_here().detach() + value


def twice_of_one_proxy(rref: Any, value: torch.Tensor) -> torch.Tensor:
    proxy = rref.rpc_sync()
    return proxy.forward(value) + proxy.forward(value + 1)


def method_kept(rref: Any, value: torch.Tensor) -> torch.Tensor:
    method = rref.rpc_sync().forward
    return method(value + 1)


def without_gradients(rref: Any, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return rref.rpc_sync().forward(value)


# How an object is made, and what a compiled function does with it.
USES: dict[str, tuple[Make, Use]] = {
    "RRef.rpc_sync": (scale, lambda it, x: it.rpc_sync().forward(x)),
    "... first": (scale, lambda it, x: it.rpc_sync().forward(x) + 1),
    "... last": (scale, lambda it, x: (x + 1) + it.rpc_sync().forward(x + 2)),
    "... nested": (scale, lambda it, x: it.rpc_sync().forward(it.rpc_sync().forward(x))),
    "... with a timeout": (scale, lambda it, x: it.rpc_sync(timeout=0).forward(value=x)),
    "... by getattr": (scale, lambda it, x: getattr(it.rpc_sync(), "forward")(x)),  # noqa: B009
    "... of special methods": (scale, lambda it, x: x + it.rpc_sync().__len__()),
    "... of an operator": (scale, lambda it, x: it.rpc_sync().__call__(x)),
    "... twice": (scale, twice_of_one_proxy),
    "... kept": (scale, method_kept),
    "... without gradients": (scale, without_gradients),
    "... in a comprehension": (
        scale,
        lambda it, x: [one.rpc_sync().forward(x) for one in [it, it]],
    ),
    "RRef.rpc_async": (scale, lambda it, x: it.rpc_async().forward(x).wait() + 1),
    "RRef.remote": (scale, lambda it, x: it.remote().forward(x).to_here() + 1),
    "RRef.to_here": (scale, lambda it, x: it.to_here().forward(x) + 1),
    "RRef.owner": (scale, lambda it, x: x + it.owner().id),
    "RRef.owner_name": (scale, lambda it, x: x + len(it.owner_name())),
    "RRef.is_owner": (scale, lambda it, x: x if it.is_owner() else x + 1),
    "RRef._get_type": (scale, lambda it, x: x + len(it._get_type().__name__)),
    "RRef.local_value": (lambda: rpc.RRef(Scale()), lambda it, x: it.local_value()(x) + 1),
    "RRef sent": (scale, lambda it, x: x + rpc.rpc_sync("w1", factor_sum, args=(it,))),
    "proxy": (lambda: scale().rpc_sync(), lambda it, x: it.forward(x) + 1),
    "proxy of rpc_async": (lambda: scale().rpc_async(), lambda it, x: it.forward(x).wait() + 1),
    "proxy of remote": (lambda: scale().remote(), lambda it, x: it.forward(x).to_here() + 1),
    "method": (lambda: scale().rpc_sync().forward, lambda it, x: it(x) + 1),
    "Future.wait": (future, lambda it, x: it.wait() + x),
    "Future.then": (future, lambda it, x: it.then(lambda done: done.wait() + 1).wait() + x),
    "RemoteModule": (module, lambda it, x: it(x) + 1),
    "RemoteModule.forward": (module, lambda it, x: it.forward(x) + 1),
    "RemoteModule.forward_async": (module, lambda it, x: it.forward_async(x).wait() + 1),
    "RemoteModule.get_module_rref": (
        module,
        lambda it, x: it.get_module_rref().rpc_sync().forward(x) + 1,
    ),
    "RemoteModule.remote_parameters": (
        module,
        lambda it, x: it.remote_parameters()[0].to_here() + x,
    ),
    "DistributedOptimizer.step": (Trained, step),
}


class Holder(torch.nn.Module):
    """A module that calls in its `forward`, as a model that is split over workers does."""

    def __init__(self, held: Any, use: Use) -> None:
        super().__init__()
        self.held, self.use = held, use

    def forward(self, value: torch.Tensor) -> Any:
        return self.use(self.held, value)


held: Any = None
use_held: Any = None


def of_a_global(value: torch.Tensor) -> Any:
    return use_held(held, value)


def by_global(make: Make, use: Use) -> Program:
    globals().update(held=make(), use_held=use)
    return of_a_global


def by_closure(make: Make, use: Use) -> Program:
    made = make()
    return lambda value: use(made, value)


def by_list(make: Make, use: Use) -> Program:
    made = [make()]
    return lambda value: [use(one, value) for one in made]


def by_dict(make: Make, use: Use) -> Program:
    made = {"key": make()}
    return lambda value: use(made["key"], value)


def by_default(make: Make, use: Use) -> Program:
    def program(value: torch.Tensor, made: Any = make()) -> Any:  # noqa: B008
        return use(made, value)

    return program


# Where the compiled code has the object from.
FORMS: dict[str, Callable[[Make, Use], Program]] = {
    "made inside": lambda make, use: lambda value: use(make(), value),
    "closure": by_closure,
    "global": by_global,
    "module": lambda make, use: Holder(make(), use),
    "list": by_list,
    "dict": by_dict,
    "default": by_default,
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return all(same(*both) for both in zip(left, right, strict=True))
    return torch.equal(left, right)


OTHER_FORMS = [form for form in FORMS if form != "closure"]


def kind_of(use: str) -> str:
    """Return which object a use is of."""
    return re.split(r"[. ]", use)[0]


def cases() -> Iterator[tuple[str, str]]:
    """Yield each use of a closure, one of each kind of object in each form, and others in turn.

    Variants of a use, whose names begin with dots, don't depend on where the object is from.
    """
    yield from (("closure", use) for use in USES)
    uses = [use for use in USES if use[:3] != "..."]
    first = {kind_of(use): use for use in reversed(uses)}
    yield from ((form, use) for form in OTHER_FORMS for use in reversed(first.values()))
    rest = [use for use in uses if use != first[kind_of(use)]]
    yield from zip(itertools.cycle(OTHER_FORMS), rest, strict=False)


CASES = list(cases())


def test_every_object_is_tried_in_every_form_and_every_use_in_two() -> None:
    kinds = {kind_of(use) for use in USES if use[:3] != "..."}
    assert {(form, kind_of(use)) for form, use in CASES} >= set(product(FORMS, kinds))
    for use in USES:
        forms = {form for form, name in CASES if name == use}
        assert len(forms) >= (1 if use[:3] == "..." else 2), use
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize(("form", "name"), CASES)
@pytest.mark.parametrize("transport", ["native"])
def test_compiled_code_gives_the_values_of_uncompiled_code(
    pair: list[Agent], form: str, name: str
) -> None:
    torch.compiler.reset()
    make, use = USES[name]
    value = torch.ones(2)
    plain = FORMS[form](make, use)
    expected = [plain(value) for _ in range(2)]
    compiled = torch.compile(FORMS[form](make, use), backend="eager")
    assert same([compiled(value) for _ in range(2)], expected)


@pytest.mark.parametrize(("form", "name"), CASES)
@pytest.mark.parametrize("transport", ["native"])
def test_compiled_code_gives_the_values_of_uncompiled_code_with_compat(
    start: Callable[..., list[Agent]], form: str, name: str
) -> None:
    if form == "module" and name.startswith("RemoteModule"):
        pytest.skip("Dynamo asks modules for `named_modules`, which torch's RemoteModule refuses")
    pair = start(2, quirks=LIKE_TORCH)
    with stands_in(pair, sys.modules[__name__]):
        test_compiled_code_gives_the_values_of_uncompiled_code(pair, form, name)
