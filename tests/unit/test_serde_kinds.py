"""Tensors of every kind arrive with all that torch's own pickling carries."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from farcall.errors import Refused
from farcall.serde import Only, Serializer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Marked(torch.Tensor):
    pass


class MarkedParameter(torch.nn.Parameter):
    pass


def attributed(value: torch.Tensor) -> torch.Tensor:
    value.mark = {"expert": 3}
    return value


X = torch.arange(6.0)
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": X.clone,
    "requires grad": lambda: X.clone().requires_grad_(),
    "strided": lambda: X.view(2, 3).t(),
    "with an offset": lambda: X[2:],
    "expanded": lambda: X[:1].expand(4),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.0),
    "complex": lambda: torch.complex(X, X),
    "conjugated": lambda: torch.complex(X, X).conj(),
    "negative": lambda: torch.complex(X, X)[:1].conj().imag,
    "parameter": lambda: torch.nn.Parameter(X),
    "frozen parameter": lambda: torch.nn.Parameter(X, requires_grad=False),
    "marked": lambda: X.clone().as_subclass(Marked),
    "marked, requires grad": lambda: X.clone().as_subclass(Marked).requires_grad_(),
    "marked parameter": lambda: MarkedParameter(X),
    "frozen marked parameter": lambda: MarkedParameter(X, requires_grad=False),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 3, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        X.view(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "nested": NESTED.clone,
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "wrapper": lambda: TwoTensor(X.clone(), X.clone()),
}
if hasattr(torch.nn, "Buffer"):
    KINDS["buffer"] = lambda: torch.nn.Buffer(X)
    KINDS["buffer, not persistent"] = lambda: torch.nn.Buffer(X, persistent=False)


def facts(value: torch.Tensor) -> dict[str, Any]:
    names = ("dtype", "layout", "device", "requires_grad", "is_nested")
    found = {name: getattr(value, name) for name in names}
    found["attributes"] = dict(vars(value))
    if not value.is_nested:
        found["shape"] = value.shape
    else:
        found["attributes"] = {k: v for k, v in vars(value).items() if k == "mark"}
    if value.layout is torch.strided and not value.is_nested:
        found["stride"] = value.stride()
    if value.is_quantized:
        found["scheme"] = value.qscheme()
        found["values"] = value.dequantize().tolist()
    elif isinstance(value, TwoTensor):
        found["attributes"] = {k: v for k, v in vars(value).items() if k == "mark"}
        found["values"] = value.a.tolist(), value.b.tolist()
    elif value.is_nested:
        found["values"] = [part.tolist() for part in value.unbind()]
    elif not value.is_meta:
        found["values"] = value.detach().to_dense().tolist()
    return found


@pytest.mark.parametrize("extra", [None, lambda: None], ids=["fast", "by value"])
@pytest.mark.parametrize("marked", [False, True], ids=["bare", "with attributes"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_arrives_as_by_torch(kind: str, marked: bool, extra: Any) -> None:
    value = attributed(KINDS[kind]()) if marked else KINDS[kind]()
    payload = Serializer().dump((value, extra))
    back = Serializer().load(payload.body, [bytearray(b) for b in payload.buffers])[0]
    assert facts(back) == facts(pickle.loads(pickle.dumps(value, 5)))
    # By torch subclasses of Parameter arrive as Parameter, and others as no leaves.
    assert (type(back), back.is_leaf) == (type(value), value.is_leaf)
    assert not marked or back.mark == {"expert": 3}


def test_attributes_may_lead_back_to_their_tensor() -> None:
    parameter = torch.nn.Parameter(X)
    parameter.itself = parameter
    back = Serializer().load(Serializer().dump(parameter).body)
    assert back.itself is back


def test_attributes_that_require_grad_are_attached_in_order() -> None:
    tensor, inner = X.clone().requires_grad_(), (X * 2).requires_grad_()
    tensor.inner = inner
    payload = Serializer().dump(tensor)
    met: list[float] = []

    def attach(arrived: torch.Tensor) -> torch.Tensor:
        met.append(float(arrived[1]))
        return arrived

    Serializer().load(payload.body, attach=attach)
    assert met == [float(sent[1]) for sent in payload.tensors] == [1.0, 2.0]


@pytest.mark.parametrize("make", [X.clone, lambda: torch.nn.Parameter(X)])
def test_attributes_are_plain_data_unless_they_stand_for_methods(make: Any) -> None:
    serializer, tensor = Serializer(), make()
    tensor.mark = [1, "a"]
    body = serializer.dump(tensor, strict=True).body
    assert serializer.load(body, only=Only()).mark == [1, "a"]
    tensor.expand = 1j
    with pytest.raises(Refused, match="expand"):
        serializer.load(serializer.dump(tensor, strict=True).body, only=Only())
