"""Gradients through modules that keep or pickle their parameters in ways of their own.

Each gets the gradients that a local call gives, or an error that names its type.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from behaviour.helpers import WAYS
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import SerializationError
from farcall.runtime.agent import Agent
from farcall.serde import Serializer

Way = Callable[..., Any]
X = torch.arange(4.0).view(2, 2)
# TorchScript warns of its own end.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.first(x)).square() * self.scale


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class BufferWithGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class OwnReduce(Net):
    def __reduce__(self) -> Any:
        return rebuilt, (type(self), self.state_dict(keep_vars=True))


def rebuilt(kind: type[Net], state: dict[str, Any]) -> Net:
    made = kind()
    for name, value in state.items():
        owner, _, attribute = name.rpartition(".")
        made.get_submodule(owner)._parameters[attribute] = value  # a buffer is among them, too
    return made


class OwnReduceOfValues(Net):
    def __reduce__(self) -> Any:
        return loaded, (type(self), self.state_dict())


class OwnStateOfValues(Net):
    def __getstate__(self) -> Any:
        return self.state_dict()

    def __setstate__(self, state: Any) -> None:
        self.__init__()  # type: ignore[misc]
        self.load_state_dict(state)


def loaded(kind: type[Net], state: dict[str, Any]) -> Net:
    made = kind()
    made.load_state_dict(state)
    return made


class OwnState(Net):
    def __getstate__(self) -> Any:
        return self.__dict__ | {"lock": None}


class AttributeWithGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class ListWithGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        scales = [torch.ones(2, requires_grad=True)]
        self.scales = torch.jit.Attribute(scales, list[torch.Tensor])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0] * self.weight


FLOWS: dict[str, Callable[[], Any]] = {
    "plain": Net,
    "tied": Tied,
    "own __reduce__": OwnReduce,
    "own __getstate__": OwnState,
    "script": lambda: torch.jit.script(Net()),
    "trace": lambda: torch.jit.trace(Net(), X),
    "tied script": lambda: torch.jit.script(Tied()),
    "script with a buffer": lambda: torch.jit.script(BufferWithGrad()),
    "script inside": lambda: nn.Sequential(nn.Linear(2, 2), torch.jit.script(Net()), nn.ReLU()),
    "graph": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))),
}
REFUSED = {
    "AttributeWithGrad": lambda: torch.jit.script(AttributeWithGrad()),
    "ListWithGrad": lambda: torch.jit.script(ListWithGrad()),
    "OwnReduceOfValues": OwnReduceOfValues,
    "OwnStateOfValues": OwnStateOfValues,
}


def apply(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def passed_on(module: Any, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("w0", apply, args=(module, x))


def itself(module: Any, x: torch.Tensor) -> Any:
    return module


def leaves(module: Any) -> list[torch.Tensor]:
    return [one for one in (*module.parameters(), *module.buffers()) if one.requires_grad]


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.parametrize("function", [apply, passed_on, itself])
@pytest.mark.parametrize("kind", FLOWS)
def test_parameters_get_the_gradients_of_a_local_call(
    pair: list[Agent], kind: str, function: Callable[..., Any], call: Way
) -> None:
    module = FLOWS[kind]()
    wanted = torch.autograd.grad(module(X).sum(), leaves(module))
    with dist_autograd.context() as context:
        got = call("w1", function, args=(module, X))
        loss = (got if isinstance(got, torch.Tensor) else got(X)).sum()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
    assert len(gradients) == len(wanted) > 0
    for leaf, gradient in zip(leaves(module), wanted, strict=True):
        torch.testing.assert_close(gradients[leaf], gradient)


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_hides_tensors_that_require_grad_is_refused(
    pair: list[Agent], kind: str, call: Way
) -> None:
    module = REFUSED[kind]()
    with (
        dist_autograd.context(),
        pytest.raises(SerializationError, match=f"a module of type {kind}"),
    ):
        call("w1", apply, args=(module, X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(call("w1", apply, args=(module, X)).detach(), module(X).detach())


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in FLOWS if "script" in kind])
def test_outside_of_a_context_a_script_module_arrives_with_leaves(
    kind: str, by_value: bool
) -> None:
    serializer = Serializer()
    sent = FLOWS[kind]()
    payload = serializer.dump((sent, (lambda: 0) if by_value else None))
    got, _ = serializer.load(payload.body, [bytearray(one) for one in payload.buffers])
    assert len(leaves(got)) == len(leaves(sent)) == len(payload.tensors)
    assert all(one.is_leaf for one in leaves(got))
    assert torch.equal(got(X), sent(X))


class Reserved(nn.Module):
    """As `RemoteModule`, whose `parameters` makes a call and gives references."""

    def __reduce__(self) -> Any:
        return Reserved, ()

    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("asked")

    named_parameters = modules = named_modules = parameters


def test_methods_of_a_module_are_not_called_while_it_is_sent(pair: list[Agent]) -> None:
    assert type(rpc.rpc_sync("w1", itself, args=(Reserved(), torch.ones(1)))) is Reserved
