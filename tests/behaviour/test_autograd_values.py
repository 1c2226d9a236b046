"""Gradients of tensors of every kind, wherever in a message they are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from behaviour.autograd_helpers import DistributedRun, Run, compare, doubles, times, weights
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.runtime.agent import Agent

# Where in a message.


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    more: dict[str, Any]
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    tensor: torch.Tensor


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


Plain = namedtuple("Plain", "first second")


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.again = [tensor]


class Own:
    """Pickles itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return Own, (self.tensor,)


WRAPPERS: dict[str, Any] = {
    "itself": lambda t: t,
    "list": lambda t: [1, t],
    "tuple": lambda t: ("a", (t,)),
    "dict": lambda t: {"k": t, "n": None},
    "ordered dict": lambda t: OrderedDict(a=t),
    "nested": lambda t: [{"a": ({"b": [t]},)}],
    "dataclass": lambda t: Batch(torch.ones(1), {"inside": t}, "x"),
    "frozen dataclass": Frozen,
    "named tuple": lambda t: Named(torch.ones(1), t),
    "namedtuple": lambda t: Plain(t, None),
    "user object": Holder,
    "object that pickles itself": Own,
}


def find(value: Any) -> torch.Tensor:
    """Return the tensor with four elements inside of this."""
    tensor = _find(value)
    assert tensor is not None
    return tensor


def _find(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.numel() == 4 else None
    if isinstance(value, dict):
        inside: Any = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif isinstance(value, Frozen):
        inside = [value.tensor]
    else:
        inside = vars(value).values() if hasattr(value, "__dict__") else ()
    return next((found for item in inside if (found := _find(item)) is not None), None)


def unwrap_and_wrap(run: Run, kind: str, value: Any, *, more: Any = None) -> Any:
    x = find(value) * run["w"]
    return WRAPPERS[kind](x if more is None else x * find(more))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_tensor_inside_of(pair: list[Agent], kind: str) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0", w="w1")
        wrap = WRAPPERS[kind]
        sent, more = wrap(run["x"].tanh()), wrap(run["y"] * 2)
        result = run.call("w1", unwrap_and_wrap, run, kind, sent, more=more)
        return find(result).sum()

    compare(pair, program)


def test_keyword_arguments(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0")
        return run.call("w1", torch.add, input=run["x"].sin(), other=run["y"], alpha=3).prod()

    compare(pair, program)


def test_tensor_in_a_function_sent_by_value(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0")
        y = run["y"].exp()
        return run.call("w1", lambda x: x * y, run["x"]).sum()

    compare(pair, program)


def test_object_with_a_method_sent_along(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0", y="w0")
        return run.call("w1", Scaler(run["y"].exp()).scale, run["x"]).sum()

    compare(pair, program)


class Scaler:
    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_parameter_as_an_argument(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        parameter = run.leaf("w0", "p", torch.nn.Parameter(doubles(4)))
        weights(run, w="w1")
        return run.call("w1", times, run, "w", parameter).sum()

    compare(pair, program)


def test_module_as_an_argument(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        weights(run, x="w0")
        module = run.module("w0", "m", torch.nn.Linear(4, 2, dtype=torch.float64))
        return run.call("w1", apply, module, run["x"]).sum()

    compare(pair, program)


def apply(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x).tanh()


# Layouts.

SHAPES: dict[str, Any] = {
    "scalar": lambda x: x.sum(),
    "one element": lambda x: x.flatten()[:1],
    "zero-size": lambda x: x[:0],
    "zero-size inside": lambda x: x[:, :, :0],
    "transposed": lambda x: x.transpose(0, 2),
    "permuted slice": lambda x: x.permute(3, 1, 0, 2)[1:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1, -1, -1),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided with holes": lambda x: x[::2, :, 1::3],
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3),
    "as_strided": lambda x: x.as_strided((3, 3), (4, 2)),
    "view of the leaf": lambda x: x.view(-1),
    "squeezed": lambda x: x[:1, :1].squeeze(),
}


def reshaped(run: Run, shape: str, x: torch.Tensor) -> torch.Tensor:
    """Works on what arrived, and sends something of the same layout back."""
    return SHAPES[shape](run["w"].sin() * (1 + x.square().sum()))


@pytest.mark.parametrize("sizes", [(2, 4, 6, 6), (3, 16, 24, 24)], ids=["small", "large"])
@pytest.mark.parametrize("shape", SHAPES)
def test_layout(pair: list[Agent], shape: str, sizes: tuple[int, ...]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "x", doubles(*sizes) / 50)
        run.leaf("w1", "w", doubles(*sizes, seed=2))
        result = run.call("w1", reshaped, run, shape, SHAPES[shape](run["x"]))
        return (result * SHAPES[shape](run["x"])).sum() + run["x"].sum()

    compare(pair, program)


def test_gradient_that_is_not_contiguous(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "x", doubles(60, 60))
        h = run.call("w1", torch.sin, run["x"].exp())
        g = run.call("w1", torch.t, h)
        return (g.T @ doubles(60, 1, seed=4)).sum() + h.sum() + h[:, 3].sum()

    compare(pair, program)


# Dtypes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtype(pair: list[Agent], dtype: torch.dtype) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "x", doubles(5).to(dtype))
        run.leaf("w1", "w", doubles(5, seed=2).to(dtype))
        return run.call("w1", times, run, "w", run["x"] * 2).sum()

    compare(pair, program)


def test_dtypes_mixed(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "x", doubles(5).float())
        run.leaf("w1", "w", doubles(5, seed=2))
        return run.call("w1", times, run, "w", run["x"].bfloat16()).float().sum()

    compare(pair, program)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(pair: list[Agent], dtype: torch.dtype) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "x", torch.complex(doubles(5), doubles(5, seed=2)).to(dtype))
        run.leaf("w1", "w", torch.complex(doubles(5, seed=3), doubles(5, seed=4)).to(dtype))
        h = run.call("w1", times, run, "w", run["x"].conj())
        return run.call("w1", torch.real, (h * h.conj()).conj()).sum()

    compare(pair, program)


def test_complex_made_of_real_and_back(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "x", doubles(6))
        spectrum = run.call("w1", torch.fft.rfft, run["x"])
        return run.call("w1", torch.view_as_real, spectrum)[:, 1].square().sum()

    compare(pair, program)


# Sparse gradients.


def look_up(run: Run, index: torch.Tensor) -> torch.Tensor:
    return run["table"](index)


def look_up_in(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.embedding(index, weight, sparse=True)


INDEX = torch.tensor([[3, 1, 3], [0, 3, 1]])


def test_sparse_gradient_of_an_embedding_on_the_callee(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        table = torch.nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        run.module("w1", "table", table)
        first = run.call("w1", look_up, run, INDEX)
        second = run.call("w1", look_up, run, INDEX + 2)
        return (first * second).sum()

    compare(pair, program)


def test_sparse_gradient_that_travels(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "weight", doubles(10, 4))
        return run.call("w1", look_up_in, run["weight"], INDEX).square().sum()

    compare(trio, program)


def test_large_sparse_gradient_that_travels(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "weight", doubles(500, 40))
        index = torch.arange(0, 500, 3)
        return run.call("w1", look_up_in, run["weight"], index).square().sum()

    compare(pair, program)


def test_sparse_gradients_from_two_workers_are_added(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "weight", doubles(10, 4))
        parts = [run.call(to, look_up_in, run["weight"], INDEX) for to in ("w1", "w2", "w1")]
        return (parts[0] * parts[1] + parts[2]).sum()

    compare(trio, program)


def test_sparse_and_dense_gradients_are_added(trio: list[Agent]) -> None:
    def program(run: Run) -> Any:
        run.leaf("w0", "weight", doubles(10, 4))
        sparse = run.call("w1", look_up_in, run["weight"], INDEX)
        dense = run.call("w2", torch.sin, run["weight"])
        return sparse.sum() + dense.sum() + look_up_in(run["weight"], INDEX).square().sum()

    compare(trio, program)


def test_sparse_gradient_of_an_embedding_bag(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        bag = torch.nn.EmbeddingBag(10, 4, sparse=True, mode="sum", dtype=torch.float64)
        run.module("w1", "table", bag)
        return run.call("w1", look_up, run, INDEX).square().sum()

    compare(pair, program)


def test_sparse_tensor_that_is_sent(pair: list[Agent]) -> None:
    def program(run: Run) -> Any:
        indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
        for worker, name, values in (("w0", "s", doubles(3)), ("w1", "t", doubles(3, seed=2))):
            leaf = torch.sparse_coo_tensor(indices, values, (3, 3), check_invariants=True)
            run.leaf(worker, name, leaf)
        total = run.call("w1", add_sparse, run, run["s"])
        return torch.sparse.sum(total * 2)

    compare(pair, program)


def add_sparse(run: Run, s: torch.Tensor) -> torch.Tensor:
    return torch.add(s, run["t"])


def test_sparse_gradients_of_two_passes_are_added(pair: list[Agent]) -> None:
    table = torch.nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
    with dist_autograd.context() as context_id:
        for _ in range(2):
            run = DistributedRun()
            run.module("w0", "table", table)
            dist_autograd.backward(context_id, [rpc.rpc_sync("w0", look_up, (run, INDEX)).sum()])
        gradient = dist_autograd.get_gradients(context_id)[table.weight]
    assert gradient.is_sparse
    table(INDEX).sum().backward()
    assert table.weight.grad is not None
    assert torch.equal(gradient.to_dense(), 2 * table.weight.grad.to_dense())
