"""Memory that tensors of one message share arrives shared, and is sent once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from farcall.errors import SerializationError
from farcall.serde import Serializer
from farcall.serde.tensors import rebuild_view

Tensors = tuple[Any, ...]
SMALL, LARGE = 24, 48_000


def tied(x: torch.Tensor) -> Tensors:
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    one.weight.data = x
    other.weight.data = one.weight.data
    return one.weight, other.weight


SHARED: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "view": lambda x: (x, x.view(2, -1)),
    "view first": lambda x: (x.view(2, -1), x),
    "detached": lambda x: (x, x.detach()),
    "parameter and its data": lambda x: (p := torch.nn.Parameter(x), p.data),
    "tied by data": tied,
    "halves": lambda x: (x[: len(x) // 2], x[len(x) // 2 :], x),
    "overlapping slices": lambda x: (x[:-3], x[3:]),
    "transposed": lambda x: (x.view(2, -1), x.view(2, -1).t()),
    "every second element": lambda x: (x[::2], x[1::2], x),
    "another dtype": lambda x: (x, x.view(torch.int32)),
    "another width": lambda x: (x[1:], x.view(torch.uint8)[7:]),
    "expanded": lambda x: (x[:1].expand(5), x),
    "storage": lambda x: (x[2:], x.untyped_storage()),
    "typed storage": lambda x: (x[2:], x.storage()),
    "complex and its parts": lambda x: (c := torch.view_as_complex(x.view(-1, 2)), c.imag, x),
    "conjugated": lambda x: (c := torch.view_as_complex(x.view(-1, 2)), c.conj(), c.conj().imag),
    "requires grad": lambda x: (g := x.clone().requires_grad_(), g.detach(), g.view(2, -1)),
    "columns of a wide matrix": lambda x: (
        m := x.repeat(100).view(-1, 200)[:, :1],
        m.detach(),
    ),
    "sparse values": lambda x: (x, torch.sparse_coo_tensor(torch.arange(len(x))[None], x)),
}
HOLDERS: dict[str, Callable[[Tensors], Any]] = {
    "plain": lambda tensors: tensors,
    "by value": lambda tensors: (tensors, lambda: None),
}


def memory_of(value: Any) -> tuple[int, int]:
    """Begin of its storage, and of itself."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value._values()
        return value.untyped_storage().data_ptr(), value.data_ptr()
    return value.data_ptr(), value.data_ptr()


def arrived(serializer: Serializer, value: Any) -> tuple[Any, int]:
    payload = serializer.dump(value)
    sent = len(payload.body) + sum(memoryview(b).nbytes for b in payload.buffers)
    return serializer.load(payload.body, [bytearray(b) for b in payload.buffers]), sent


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("case", SHARED)
def test_shared_memory_arrives_shared_and_once(case: str, count: int, holder: str) -> None:
    tensors = SHARED[case](torch.arange(float(count)))
    value, sent = arrived(Serializer(), HOLDERS[holder](tensors))
    back = value if holder == "plain" else value[0]
    for before, after in zip(tensors, back, strict=True):
        if isinstance(before, torch.Tensor):
            assert (type(after), after.dtype) == (type(before), before.dtype)
            assert torch.equal(after.to_dense(), before.to_dense())
            assert after.requires_grad == before.requires_grad
            assert (after.is_conj(), after.is_neg()) == (before.is_conj(), before.is_neg())
    places = [memory_of(value) for value in tensors]
    found = [memory_of(value) for value in back]
    assert len({storage for storage, _ in found}) == 1
    first = places[0][1] - found[0][1]
    assert [before[1] - after[1] for before, after in zip(places, found, strict=True)] == [
        first
    ] * len(found)
    if count == LARGE and case != "sparse values":
        assert sent < 1.2 * 4 * LARGE + 4096


def test_shared_memory_that_is_sent_on_is_still_shared() -> None:
    x = torch.arange(6.0)
    back, _ = arrived(Serializer(), (x, x.view(2, 3)))
    again, _ = arrived(Serializer(), back)
    again[0].fill_(5)
    assert torch.equal(again[1], torch.full((2, 3), 5.0))


def test_far_parts_of_a_large_storage_are_sent_without_the_bytes_between() -> None:
    x = torch.arange(10_000_000.0)
    value, sent = arrived(Serializer(), (x[:10], x[5:15], x[-10:]))
    assert sent < 1000
    assert [v.tolist() for v in value] == [x[:10].tolist(), x[5:15].tolist(), x[-10:].tolist()]
    assert value[1].data_ptr() - value[0].data_ptr() == 20


def test_columns_of_a_large_matrix_are_sent_without_the_others() -> None:
    x = torch.rand(1000, 1000)
    value, sent = arrived(Serializer(), (x[:, 0], x[:, 0].detach(), x[:, 9]))
    assert sent < 9000
    assert torch.equal(value[2], x[:, 9])
    assert value[0].data_ptr() == value[1].data_ptr()


def test_tensors_that_share_are_attached_in_order() -> None:
    x = torch.rand(6, requires_grad=True)
    y = x.view(2, 3)
    payload = Serializer().dump((x, y, x.detach()))
    assert [t is u for t, u in zip(payload.tensors, (x, y), strict=True)] == [True, True]
    met: list[torch.Tensor] = []

    def attach(tensor: torch.Tensor) -> torch.Tensor:
        met.append(tensor)
        return tensor

    back = Serializer().load(payload.body, attach=attach)
    assert [t is u for t, u in zip(met, back[:2], strict=True)] == [True, True]


def test_a_freed_storage_that_is_shared_is_refused() -> None:
    x = torch.rand(10)
    y = x.view(2, 5)
    x.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="resized"):
        Serializer().dump((x, y))


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((5,), (1,), 0),
        ((4,), (1,), 4),
        ((2, 2), (3, 1), 0),
        ((1,), (1,), -4),
        ((2,), (-1,), 4),
        ((1,), (1,), 2),
        ((1 << 62,), (8,), 0),
        ((True,), (1,), 0),
        ((2,), (), 0),
        ((1.0,), (1,), 0),
        ((0,), (1,), 1 << 40),
    ],
)
def test_a_view_beyond_its_storage_is_refused(shape: Any, stride: Any, offset: Any) -> None:
    storage = torch.zeros(4).untyped_storage()
    with pytest.raises((ValueError, TypeError)):
        rebuild_view(storage, "float32", shape, stride, offset, False, False, False)
    assert storage.nbytes() == 16
