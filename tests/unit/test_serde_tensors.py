"""Tensors arrive as they left: values, dtype, strides, aliasing; small when they can be."""

from __future__ import annotations

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.errors import SerializationError
from farcall.serde import DeviceMap, Payload, Serializer, tensors

pytestmark = pytest.mark.usefixtures("halves")

SERIALIZER = Serializer()


def arrive(payload: Payload, serializer: Serializer = SERIALIZER, **options: object) -> object:
    """Load as a receiver would: over its own copy of each buffer."""
    buffers = [bytearray(buffer) for buffer in payload.buffers]
    return serializer.load(payload.body, buffers, **options)  # type: ignore[arg-type]


def travel(value: object, serializer: Serializer = SERIALIZER) -> object:
    return arrive(serializer.dump(value), serializer)


def size_of(payload: Payload) -> int:
    return len(payload.body) + sum(len(buffer) for buffer in payload.buffers)


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


# Left out: quantized types, raw bits, and integers of less than a byte, which hold no plain values.
PLAIN_DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
        and not re.fullmatch(r"torch\.(q.*|bits.*|u?int[1-7])", str(value))
    },
    key=str,
)


def of_dtype(dtype: torch.dtype, count: int) -> torch.Tensor:
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("count", [6, 20_000])
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype, count: int) -> None:
    sent = of_dtype(dtype, count).view(2, -1)
    got = travel(sent)
    assert got.dtype is dtype
    assert got.shape == sent.shape
    assert bits(got) == bits(sent)


def test_the_dtypes_tested_are_the_ones_that_matter() -> None:
    wanted = {torch.bool, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
    wanted |= {torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.float64}
    wanted |= {torch.float8_e4m3fn, torch.float8_e5m2}
    assert wanted <= set(PLAIN_DTYPES)


BASE = torch.arange(24.0)
LAYOUTS = {
    "0-dim": torch.tensor(3.5),
    "0-dim integer": torch.tensor(3),
    "empty": torch.empty(0),
    "empty 2d": torch.empty(3, 0, 2),
    "one": torch.ones(1),
    "transposed": BASE.view(4, 6).t(),
    "permuted": BASE.view(2, 3, 4).permute(2, 0, 1),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last large": torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last),
    "channels_last one channel": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 1000),
    "every second": BASE[::2],
    "offset": BASE[5:9],
    "column": BASE.view(4, 6)[:, 1],
    "overlapping": BASE.as_strided((4, 3), (2, 1)),
    "large transposed": torch.randn(100, 200).t(),
}


@pytest.mark.parametrize("sent", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_strides_survive(sent: torch.Tensor) -> None:
    got = travel(sent)
    assert torch.equal(got, sent)
    assert got.stride() == sent.stride()
    assert got.dtype == sent.dtype
    assert type(got) is torch.Tensor
    assert got._base is None


def test_conjugate_and_negative_views_arrive_resolved() -> None:
    value = torch.randn(5, dtype=torch.complex64)
    for sent in (value.conj(), value.conj().imag):
        got = travel(sent)
        assert torch.equal(got, sent)
        assert not got.is_conj()
        assert not got.is_neg()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:10],
        lambda t: t[500_000:500_010],
        lambda t: t[::100_000],
        lambda t: t.view(1000, 1000)[:, 3],
        lambda t: t.view(1000, 1000)[::100, ::100],
        lambda t: t[7],
    ],
)
def test_view_of_a_huge_storage_is_a_small_message(view: object) -> None:
    sent = view(torch.arange(1_000_000.0))  # type: ignore[operator]
    payload = SERIALIZER.dump(sent)
    assert size_of(payload) <= max(2 * sent.nbytes, 8192) + 300
    assert torch.equal(arrive(payload), sent)


def test_expanded_tensor_is_not_blown_up() -> None:
    payload = SERIALIZER.dump(torch.zeros(1, 8).expand(100_000, 8))
    assert size_of(payload) < 300
    assert arrive(payload).shape == (100_000, 8)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    seed=st.integers(0, 1000),
    step=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
@settings(max_examples=60, deadline=None)
def test_any_strided_view_arrives_equal(
    shape: list[int], seed: int, step: int, dtype: torch.dtype
) -> None:
    order = torch.randperm(len(shape), generator=torch.Generator().manual_seed(seed)).tolist()
    sent = torch.randint(0, 2, shape).to(dtype).permute(order)
    for dim in range(sent.dim()):
        sent = sent[(slice(None),) * dim + (slice(None, None, step),)]
    got = travel(sent)
    assert torch.equal(got, sent)


SPARSE = {
    "coo": lambda d: d.to_sparse_coo(),
    "csr": lambda d: d.to_sparse_csr(),
    "csc": lambda d: d.to_sparse_csc(),
    "bsr": lambda d: d.to_sparse_bsr((2, 2)),
    "bsc": lambda d: d.to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse_tensors_keep_their_layout(make: object, requires_grad: bool) -> None:
    dense = torch.eye(4)
    sent = make(dense).requires_grad_(requires_grad)  # type: ignore[operator]
    got = travel(sent)
    assert got.layout == sent.layout
    assert got.requires_grad is requires_grad
    assert torch.equal(got.detach().to_dense(), dense)


def test_coo_keeps_whether_it_is_coalesced() -> None:
    indices, values = torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 3.0])
    sent = torch.sparse_coo_tensor(indices, values, (2,))
    got = travel(sent)
    assert not got.is_coalesced()
    assert got._nnz() == 3
    assert travel(sent.coalesce()).is_coalesced()


@pytest.mark.filterwarnings("ignore")
def test_quantized_meta_and_subclass_tensors_travel_torchs_own_way() -> None:
    quantized = torch.quantize_per_tensor(torch.randn(50_000), 0.1, 3, torch.qint8)
    got = travel(quantized)
    assert got.q_scale() == pytest.approx(0.1)
    assert torch.equal(got.int_repr(), quantized.int_repr())
    assert travel(torch.empty(3, 4, device="meta")).device.type == "meta"
    subclassed = torch.randn(3).as_subclass(Marked)
    assert type(travel(subclassed)) is Marked
    assert torch.equal(travel(subclassed), subclassed)


class Marked(torch.Tensor):
    pass


def test_large_storage_of_a_subclass_goes_out_of_band() -> None:
    payload = SERIALIZER.dump(torch.randn(10_000).as_subclass(Marked))
    assert len(payload.body) < 1000
    assert [len(buffer) for buffer in payload.buffers] == [40_000]


def test_tensor_requiring_grad_arrives_as_a_leaf() -> None:
    leaf = torch.randn(3, requires_grad=True)
    for sent in (leaf, leaf * 2, torch.randn(3, 4, requires_grad=True).t()):
        got = travel(sent)
        assert got.requires_grad
        assert got.is_leaf
        assert got.grad_fn is None
        assert torch.equal(got, sent)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameter_arrives_as_parameter(requires_grad: bool) -> None:
    sent = torch.nn.Parameter(torch.randn(3, 4), requires_grad=requires_grad)
    got = travel(sent)
    assert type(got) is torch.nn.Parameter
    assert got.requires_grad is requires_grad
    assert torch.equal(got, sent)


def test_tensors_requiring_grad_are_listed_on_both_sides_in_the_same_order() -> None:
    first = torch.ones(2, requires_grad=True)
    second = torch.nn.Parameter(torch.full((2, 2), 2.0))
    third = torch.full((3,), 3.0, requires_grad=True) * 1
    sparse = torch.eye(2).to_sparse().requires_grad_()
    message = {"a": [first, torch.zeros(2)], "b": (second, first), "c": third, "d": sparse}
    payload = SERIALIZER.dump(message)
    assert [id(t) for t in payload.tensors] == [id(t) for t in (first, second, third, sparse)]
    arrived: list[torch.Tensor] = []
    got = arrive(payload, attach=lambda leaf: arrived.append(leaf) or leaf)
    expected = (got["a"][0], got["b"][0], got["c"], got["d"])
    assert [id(t) for t in arrived] == [id(t) for t in expected]


def test_by_value_fallback_lists_each_gradient_tensor_once() -> None:
    tensor = torch.ones(2, requires_grad=True)
    payload = SERIALIZER.dump((tensor, lambda: tensor))
    assert [id(t) for t in payload.tensors] == [id(tensor)]


def test_same_tensor_twice_arrives_as_one_object() -> None:
    tensor = torch.randn(5)
    got = travel([tensor, {"again": tensor}])
    assert got[0] is got[1]["again"]


@pytest.mark.parametrize("count", [4, 100_000])
def test_arrived_tensor_is_writable_and_its_own(count: int) -> None:
    sent = torch.zeros(count)
    got = travel(sent)
    got.add_(1)
    assert got.sum() == count
    assert sent.sum() == 0


def test_large_tensor_is_neither_copied_out_nor_in() -> None:
    sent = torch.randn(100_000)
    payload = SERIALIZER.dump(sent)
    assert np.frombuffer(payload.buffers[0], np.uint8).ctypes.data == sent.data_ptr()
    received = bytearray(payload.buffers[0])
    got = SERIALIZER.load(payload.body, [received])
    assert got.data_ptr() == np.frombuffer(received, np.uint8).ctypes.data
    del received
    assert torch.equal(got, sent)


def test_buffer_keeps_the_sent_memory_alive() -> None:
    payload = SERIALIZER.dump(torch.full((100_000,), 7.0))
    assert (arrive(payload) == 7).all()


def test_read_only_buffers_are_copied_rather_than_written_to() -> None:
    payload = SERIALIZER.dump(torch.zeros(100_000))
    received = bytes(payload.buffers[0])
    SERIALIZER.load(payload.body, [received]).add_(1)
    assert not any(received)


def test_memoryviews_of_a_larger_frame_serve_as_buffers() -> None:
    sent = [torch.randn(10_000), torch.randn(20_000)]
    payload = SERIALIZER.dump(sent)
    frame = memoryview(bytearray(b"".join(payload.buffers)))
    got = SERIALIZER.load(memoryview(payload.body), [frame[:40_000], frame[40_000:]])
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))


def test_small_tensors_stay_in_the_body_and_large_ones_leave_it() -> None:
    assert not SERIALIZER.dump(torch.zeros(4095)).buffers
    payload = SERIALIZER.dump(torch.zeros(4096))
    assert [len(buffer) for buffer in payload.buffers] == [16384]
    assert len(payload.body) < 200


def test_numpy_arrays_follow_the_same_rule() -> None:
    small, large = np.arange(10), np.arange(10_000.0).reshape(100, 100)
    payload = SERIALIZER.dump((small, large))
    assert [len(buffer) for buffer in payload.buffers] == [large.nbytes]
    got = arrive(payload)
    assert np.array_equal(got[0], small)
    assert np.array_equal(got[1], large)
    assert all(array.flags.writeable for array in got)


def test_module_and_state_dict_arrive_equal_with_tied_weights_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(50, 200), torch.nn.Linear(50, 200))
    module[1].weight = module[0].weight
    got = travel(module)
    assert got[0].weight is got[1].weight
    for name, value in travel(module.state_dict()).items():
        assert torch.equal(value, module.state_dict()[name])
    inputs = torch.randn(2, 50)
    assert torch.equal(got[0](inputs), module[0](inputs))


@dataclasses.dataclass
class Batch:
    observations: torch.Tensor
    notes: list[object]


def test_dataclasses_and_nested_containers_arrive_equal() -> None:
    got = travel(Batch(torch.ones(3), [1, {"x": (torch.zeros(2), None)}]))
    assert isinstance(got, Batch)
    assert torch.equal(got.observations, torch.ones(3))
    assert torch.equal(got.notes[1]["x"][0], torch.zeros(2))


def test_script_modules_and_functions_travel_inside_arguments() -> None:
    module = torch.jit.script(torch.nn.Linear(3, 2))
    inputs = torch.randn(4, 3)
    assert torch.equal(travel({"m": module})["m"](inputs), module(inputs))
    traced = torch.jit.trace(torch.nn.Linear(3, 2), inputs)
    assert torch.equal(travel(traced)(inputs), traced(inputs))
    assert travel([increment])[0] is increment


@torch.jit.script
def increment(value: torch.Tensor) -> torch.Tensor:
    return value + 1


def test_freed_storage_is_an_error_and_not_a_crash() -> None:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="resized to 0 bytes"):
        SERIALIZER.dump(tensor)


def test_device_map_is_asked_where_a_tensor_goes() -> None:
    # No accelerator here: the step that follows the look at the device, on a CPU tensor.
    sent = torch.randn(3)
    rebuild, args = tensors._reduce_device(
        sent, DeviceMap(lambda device: torch.device(device.type))
    )
    assert torch.equal(rebuild(*args), sent)


def test_tensor_of_another_device_is_refused_without_a_map() -> None:
    with pytest.raises(SerializationError, match="set_device_map"):
        tensors._reduce_device(torch.randn(3), None)


def test_deep_copy_of_an_arrived_tensor_is_independent() -> None:
    got = travel(torch.zeros(5000))
    other = copy.deepcopy(got)
    other.add_(1)
    assert got.sum() == 0


def test_arrived_tensor_is_no_view_to_autograd() -> None:
    got = travel(torch.ones(2, 2))
    weight = torch.ones(2, 2, requires_grad=True)
    got.mul_(weight)
    assert type(got.grad_fn).__name__ == "MulBackward0"
