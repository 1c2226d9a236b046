"""Gradients through tensors of unusual kinds: the local ones, or an error that names the kind."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import SerializationError
from farcall.runtime.agent import Agent

COUNT = 4
LARGE = 8192
ran = threading.Event()


class Marked(torch.Tensor):
    pass


class MarkedParameter(torch.nn.Parameter):
    pass


class Strict(torch.Tensor):
    """Its own functions refuse unexpected arguments."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.Tensor.clone, torch.Tensor.expand_as, torch.Tensor.detach):
            raise AssertionError(f"{func} was called")
        return super().__torch_function__(func, types, args, kwargs or {})


FLOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x * 1,
    "with attributes": lambda x: mark(x * 1),
    "subclass": lambda x: (x * 1).as_subclass(Marked),
    "strict subclass": lambda x: (x * 1).as_subclass(Strict),
    "sparse": lambda x: (x * 1).to_sparse(),
}
LEAVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter with attributes": lambda x: mark(torch.nn.Parameter(x)),
    "parameter subclass": MarkedParameter,
    "leaf of a subclass": lambda x: x.as_subclass(Marked).requires_grad_(),
    "buffer": lambda x: mark(x.clone().requires_grad_()),
}


def mark(x: torch.Tensor) -> torch.Tensor:
    x.mark = 5
    return x


def jagged(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)


def strided_nested(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor([x[:1] * 1, x[1:] * 1])


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "jagged": jagged,
    "nested": strided_nested,
    "wrapper": lambda x: TwoTensor(x.detach(), x.detach()).requires_grad_(),
}


def dense(x: torch.Tensor) -> torch.Tensor:
    x = x.to_dense() if x.layout is not torch.strided else x
    return x.as_subclass(torch.Tensor)


def squared(x: torch.Tensor) -> torch.Tensor:
    ran.set()
    return dense(x).square()


def made(kind: str, x: torch.Tensor) -> torch.Tensor:
    return {**FLOWS, **REFUSED}[kind](x.square())


def kind_of(x: torch.Tensor) -> tuple[str, int]:
    return type(x).__name__, getattr(x, "mark", 0)


@pytest.mark.parametrize("count", [COUNT, LARGE])
@pytest.mark.parametrize("kind", FLOWS)
def test_gradients_flow_through_an_argument(pair: list[Agent], kind: str, count: int) -> None:
    x = torch.arange(float(count), requires_grad=True)
    (expected,) = torch.autograd.grad(squared(FLOWS[kind](x)).sum(), x)
    with dist_autograd.context() as context:
        sent = FLOWS[kind](x)
        loss = rpc.rpc_sync("w1", squared, args=(sent,)).sum()
        assert rpc.rpc_sync("w1", kind_of, args=(sent,)) == kind_of(sent)
        dist_autograd.backward(context, [loss])
        assert torch.equal(dist_autograd.get_gradients(context)[x], expected)


@pytest.mark.parametrize("kind", FLOWS)
def test_gradients_flow_through_an_asynchronous_argument(pair: list[Agent], kind: str) -> None:
    x = torch.arange(4.0, requires_grad=True)
    with dist_autograd.context() as context:
        loss = rpc.rpc_async("w1", squared, args=(FLOWS[kind](x),)).wait().sum()
        dist_autograd.backward(context, [loss])
        assert torch.equal(dist_autograd.get_gradients(context)[x], 2 * x.detach())


@pytest.mark.parametrize("kind", FLOWS)
def test_gradients_flow_through_an_answer(pair: list[Agent], kind: str) -> None:
    x = torch.arange(4.0, requires_grad=True)
    (expected,) = torch.autograd.grad(dense(made(kind, x)).square().sum(), x)
    with dist_autograd.context() as context:
        loss = dense(rpc.rpc_sync("w1", made, args=(kind, x))).square().sum()
        dist_autograd.backward(context, [loss])
        assert torch.equal(dist_autograd.get_gradients(context)[x], expected)


@pytest.mark.parametrize("kind", LEAVES)
def test_leaves_get_their_gradient(pair: list[Agent], kind: str) -> None:
    leaf = LEAVES[kind](torch.arange(4.0))
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("w1", squared, args=(leaf,)).sum()
        dist_autograd.backward(context, [loss])
        gradient = dist_autograd.get_gradients(context)[leaf]
        assert dense(gradient).tolist() == [0.0, 2.0, 4.0, 6.0]


def sync(sent: torch.Tensor) -> None:
    rpc.rpc_sync("w1", squared, args=(sent,))


def asynchronous(sent: torch.Tensor) -> None:
    rpc.rpc_async("w1", squared, args=(sent,)).wait()


def remote(sent: torch.Tensor) -> None:
    rpc.remote("w1", squared, args=(sent,)).to_here()


@pytest.mark.parametrize("kind", REFUSED)
def test_an_argument_without_gradients_is_refused_before_it_leaves(
    pair: list[Agent], kind: str
) -> None:
    x = torch.arange(4.0, requires_grad=True)
    sent = REFUSED[kind](x)
    ran.clear()
    with dist_autograd.context():
        for call in (sync, asynchronous, remote):
            with pytest.raises(SerializationError, match=type(sent).__name__):
                call(sent)
        assert torch.equal(rpc.rpc_sync("w1", torch.add, args=(x, 1)), x + 1)
    assert not ran.is_set()


@pytest.mark.parametrize("kind", REFUSED)
def test_an_answer_without_gradients_is_refused(pair: list[Agent], kind: str) -> None:
    x = torch.arange(4.0, requires_grad=True)
    with (
        dist_autograd.context(),
        pytest.raises(SerializationError, match=type(REFUSED[kind](x)).__name__),
    ):
        rpc.rpc_sync("w1", made, args=(kind, x))


def test_views_of_one_storage_each_have_a_gradient(pair: list[Agent]) -> None:
    for count in (4, LARGE):
        x = torch.arange(float(count), requires_grad=True)
        with dist_autograd.context() as context:
            y = x * 2
            loss = rpc.rpc_sync("w1", torch.dot, args=(y, y.view(2, -1).view(-1)))
            dist_autograd.backward(context, [loss])
            assert torch.equal(dist_autograd.get_gradients(context)[x], 8 * x.detach())


def write(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    first.fill_(3)
    return second


@pytest.mark.parametrize("count", [COUNT, LARGE, 1 << 20])
def test_a_write_to_a_tensor_shows_in_its_view(pair: list[Agent], count: int) -> None:
    x = torch.zeros(count)
    back = rpc.rpc_sync("w1", write, args=(x, x.view(2, -1)))
    assert torch.equal(back, torch.full((2, count // 2), 3.0))
    assert torch.equal(x, torch.zeros(count))
