"""Tensors, and objects that hold them, over real calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from behaviour.helpers import WAYS, Gate, echo
from farcall import rpc
from farcall.runtime.agent import Agent

each_way = pytest.mark.parametrize("call", WAYS)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex128, torch.complex64, torch.complex32, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip

BASE = torch.arange(24.0).reshape(2, 3, 4)
LAYOUTS = {
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0),
    "empty in one dimension": torch.empty(3, 0, 2),
    "transposed": BASE.transpose(0, 2),
    "permuted": BASE.permute(2, 0, 1),
    "sliced": BASE[:, ::2],
    "with an offset": BASE[1, 1:],
    "expanded": torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 5),
    "expanded scalar": torch.tensor(7.0).expand(3, 4),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "large and transposed": torch.rand(300, 200).t(),
    "negated view": torch.complex(BASE, -BASE).imag,
    "conjugated view": torch.complex(BASE, -BASE).conj(),
}
SPARSE = {
    "coo": torch.eye(4).to_sparse(),
    "coo, not coalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
    "csr": torch.eye(4).to_sparse_csr(),
    "csc": torch.eye(4).to_sparse_csc(),
    "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
}


@dataclass
class Batch:
    inputs: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride()


def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.fill_(value)


def total_after(gate: Gate, tensor: torch.Tensor) -> float:
    gate.wait()
    return float(tensor.sum())


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def forward(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x)


def same_memory(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.data_ptr() for tensor in tensors}) == 1


@each_way
def test_every_dtype_arrives(pair: list[Agent], call: Callable[..., Any]) -> None:
    # Inside the pickle, and beside it.
    for dtype, count in itertools.product(DTYPES, (6, 20_000)):
        raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(2, count // 2)
        back = call("w1", echo, (tensor,))
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        arrived, sent = (each.contiguous().view(torch.uint8) for each in (back, tensor))
        assert torch.equal(arrived, sent), (dtype, count)


@each_way
def test_every_layout_arrives(pair: list[Agent], call: Callable[..., Any]) -> None:
    for layout, tensor in LAYOUTS.items():
        back = call("w1", echo, (tensor,))
        assert torch.equal(back, tensor), layout
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), layout


@pytest.mark.parametrize("layout", ["transposed", "permuted", "expanded", "channels last"])
def test_strides_survive(pair: list[Agent], layout: str) -> None:
    tensor = LAYOUTS[layout]
    assert rpc.rpc_sync("w1", stride_of, args=(tensor,)) == tensor.stride()


@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_tensors_arrive(pair: list[Agent], layout: str) -> None:
    tensor = SPARSE[layout]
    back = rpc.rpc_sync("w1", echo, args=(tensor,))
    assert back.layout == tensor.layout
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if layout.startswith("coo"):
        assert back.is_coalesced() == tensor.is_coalesced()


@each_way
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_a_received_tensor_shares_no_memory(
    pair: list[Agent], call: Callable[..., Any], to: str
) -> None:
    for size in (4, 100_000):
        tensor = torch.zeros(size)
        back = call(to, fill, (tensor, 1.0))
        assert not tensor.any()
        assert back.all()
        back.fill_(2.0)  # what arrives can be written to
        assert not tensor.any()


@pytest.mark.parametrize("size", [4, 100_000, 2_000_000])
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_arguments_may_be_changed_when_the_call_was_made(
    start: Callable[..., list[Agent]], gate: Gate, to: str, size: int
) -> None:
    start(2, num_worker_threads=1)
    tensor = torch.ones(size)
    future = rpc.rpc_async(to, total_after, args=(gate, tensor))
    queued = rpc.rpc_async(to, torch.sum, args=(tensor,))
    rref = rpc.remote(to, torch.sum, args=(tensor,))
    tensor.zero_()
    gate.open()
    assert future.wait() == queued.wait() == rref.to_here() == size


def test_big_tensors_arrive_whole(pair: list[Agent]) -> None:
    tensor = torch.arange(8_000_000)
    back = rpc.rpc_sync("w1", torch.add, args=(tensor, 1))
    assert torch.equal(back, tensor + 1)


def test_a_view_does_not_bring_its_storage(pair: list[Agent]) -> None:
    huge = torch.zeros(10_000_000)
    for view in (huge[5:10], huge[::1_000_000], huge.view(1000, 10_000)[:, 0], huge[7]):
        assert rpc.rpc_sync("w1", storage_bytes, args=(view,)) <= 8 * view.numel() + 64
        assert torch.equal(rpc.rpc_sync("w1", echo, args=(view,)), view)


def test_one_tensor_twice_arrives_as_one(pair: list[Agent]) -> None:
    for size in (4, 100_000):
        tensor = torch.ones(size)
        assert rpc.rpc_sync("w1", same_memory, args=([tensor, tensor],))


def test_requires_grad_survives_on_a_leaf(pair: list[Agent]) -> None:
    tensor = torch.ones(3, requires_grad=True)
    back = rpc.rpc_sync("w1", echo, args=(tensor * 2,))
    assert back.requires_grad
    assert not rpc.rpc_sync("w1", echo, args=(torch.ones(3),)).requires_grad


def test_objects_that_hold_tensors_arrive(pair: list[Agent]) -> None:
    batch = Batch(torch.rand(3, 4), {"a": [torch.rand(2), torch.arange(20_000)], "b": []})
    back = rpc.rpc_sync("w1", echo, args=(batch,))
    assert isinstance(back, Batch)
    assert torch.equal(back.inputs, batch.inputs)
    assert all(map(torch.equal, back.extra["a"], batch.extra["a"]))
    nested = rpc.rpc_sync("w1", echo, args=([(batch.inputs, {"x": batch.inputs})],))
    assert torch.equal(nested[0][1]["x"], batch.inputs)


def test_modules_and_state_dicts_arrive(pair: list[Agent]) -> None:
    net, x = Net(), torch.rand(3, 4)
    torch.testing.assert_close(rpc.rpc_sync("w1", forward, args=(net, x)), net(x))
    back = rpc.rpc_sync("w1", echo, args=(net,))
    assert isinstance(back.layer.weight, torch.nn.Parameter)
    assert back.layer.weight.requires_grad
    other = Net()
    other.load_state_dict(rpc.rpc_sync("w1", echo, args=(net.state_dict(),)))
    assert torch.equal(other(x), net(x))


def test_a_module_can_live_elsewhere(pair: list[Agent]) -> None:
    net = rpc.remote("w1", Net)
    x = torch.rand(3, 4)
    assert net.rpc_sync().forward(x).shape == (3, 2)
    copy = net.to_here()
    torch.testing.assert_close(net.rpc_sync().forward(x), copy(x))


@pytest.mark.parametrize("dtype", ["f8", "i4", "?", "U5", "datetime64[s]"])
def test_numpy_arrays_arrive(pair: list[Agent], dtype: str) -> None:
    for array in (np.zeros((3, 4), dtype), np.ones(30_000, dtype), np.zeros((4, 5), dtype).T):
        back = rpc.rpc_sync("w1", echo, args=(array,))
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


def test_other_torch_objects_arrive(pair: list[Agent]) -> None:
    things = [torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided]
    assert rpc.rpc_sync("w1", echo, args=(things,)) == things
    assert rpc.rpc_sync("w1", echo, args=(torch.channels_last,)) is torch.channels_last
