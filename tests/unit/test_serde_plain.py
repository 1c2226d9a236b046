"""The compiled half of the serializer does what the picklers do, or leaves it to them."""

from __future__ import annotations

import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import __main__
from farcall.errors import SerializationError
from farcall.serde import Payload, Serializer
from farcall.serde.plain import accelerator
from farcall.serde.tensors import INLINE_BYTES, rebuild_tensor
from farcall.serde.unpickling import MainUnpickler

_native = pytest.importorskip("farcall._native", reason="the C++ part is not built")
if accelerator(None, None) is None:
    pytest.skip("torch is too old for the compiled half", allow_module_level=True)

SERIALIZER = Serializer()
PLAIN: Any = SERIALIZER.plain
IN_PYTHON = Serializer()
IN_PYTHON.plain = None


def compiled(value: object, serializer: Serializer = SERIALIZER) -> Payload | None:
    """Return the compiled half's pickle of a value."""
    assert serializer.plain is not None
    made = serializer.plain.dump(value)
    if made is None:
        return None
    return Payload(made) if isinstance(made, bytes) else Payload(*made)


def load(payload: Payload, serializer: Serializer = SERIALIZER, attach: Any = None) -> Any:
    assert serializer.plain is not None
    buffers = [bytearray(buffer) for buffer in payload.buffers]
    return serializer.plain.load(payload.body, buffers, (), attach)


def same(a: Any, b: Any) -> bool:
    """Return whether two values have the same types and values, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, torch.Tensor):
        return (
            a.dtype is b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and a.requires_grad is b.requires_grad
            and torch.equal(a, b)
        )
    return bool(a == b)


# Both ways, by either half.

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
KEYS = st.integers(-5, 300) | st.text(max_size=5) | st.tuples(st.booleans(), st.integers(0, 9))


@st.composite
def dense(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    made = torch.arange(torch.Size(shape).numel()).remainder(2).reshape(shape).to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        made = made.transpose(0, -1)
    return made.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


VALUES = st.recursive(
    SCALARS | dense(),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=6)
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_plain_values_arrive_the_same_by_either_half(value: object) -> None:
    payload = compiled(value)
    assert payload is not None
    assert same(load(payload), value)
    assert same(pickle.loads(payload.body), value)
    by_pickler = IN_PYTHON.dump(value)
    assert same(load(by_pickler), value)
    assert [id(tensor) for tensor in payload.tensors] == [id(t) for t in by_pickler.tensors]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 12, 40_000])
def test_dtypes(dtype: torch.dtype, count: int) -> None:
    tensor = torch.arange(count).remainder(2).to(dtype)
    for sent in (tensor, tensor.reshape(1, -1), tensor[0]):
        payload = compiled(sent)
        assert payload is not None
        assert bool(payload.buffers) is (sent.nbytes >= INLINE_BYTES)
        assert same(load(payload), sent)
        assert same(load(IN_PYTHON.dump(sent)), sent)


def test_views_arrive_with_their_strides() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    for sent in (whole.permute(2, 0, 1), whole[1:, :, 1:3], whole[0, 0, ::2], whole[..., 0]):
        payload = compiled(sent)
        assert payload is not None
        assert same(load(payload), sent)


class Tensor(torch.Tensor):
    pass


class Number(int):
    pass


def conjugate() -> torch.Tensor:
    return torch.ones(3, dtype=torch.cfloat).conj()


SPARSE = torch.eye(3).to_sparse()
LIST: list[int] = [1]
DEEP: Any = ()
for _ in range(40):
    DEEP = (DEEP,)


@pytest.mark.parametrize(
    "value",
    [
        *(1 << 63, -(1 << 63) - 1, "\ud800", "x" * 100_000, b"x" * 100_000, bytearray(3)),
        *(Number(1), OrderedDict(), {1, 2}, 1j, object(), lambda: 0, Serializer.dump.__get__(1)),
        *([LIST, LIST], (whole := torch.ones(2), whole), DEEP, [0] * 5000),
        *(torch.empty(0), torch.ones(1).expand(4), torch.ones(5000)[::100]),
        *(SPARSE, SPARSE.to_sparse_csr(), torch.ones(3).to_mkldnn(), torch.empty(3, device="meta")),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        *(conjugate(), conjugate().imag, torch._efficientzerotensor((3,))),
        *(torch.nested.nested_tensor([torch.ones(3)]), Tensor([1.0])),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_not_plain_is_left_to_the_picklers(value: object) -> None:
    assert compiled(value) is None
    assert compiled([1, (value,)]) is None


def test_tensor_whose_memory_was_freed_is_left_to_the_picklers() -> None:
    for size, start in ((0, 0), (0, 2), (8, 2)):
        tensor = torch.ones(8)[start:]
        tensor.untyped_storage().resize_(size)
        assert compiled(tensor) is None
        with pytest.raises(SerializationError, match="resized"):
            SERIALIZER.dump(tensor)


def test_tensor_inside_a_transformation_is_left_to_the_picklers() -> None:
    def check(x: torch.Tensor) -> torch.Tensor:
        assert compiled(x) is None
        return x

    torch.func.vmap(check)(torch.ones(2, 3))


# Memory.


def test_large_tensor_is_copied_on_neither_side() -> None:
    sent = torch.arange(40_000.0).reshape(200, 200).t()
    payload = compiled(sent)
    assert payload is not None
    (buffer,) = payload.buffers
    assert rebuild_tensor(buffer, "float32").data_ptr() == sent.data_ptr()
    memory = bytearray(buffer)
    assert SERIALIZER.plain is not None
    got = SERIALIZER.plain.load(payload.body, [memory], (), None)
    assert same(got, sent)
    memory[:4] = bytes(4)
    got[1, 0] = 7.0
    assert got[0, 0] == 0.0
    assert torch.frombuffer(memory, dtype=torch.float32)[1] == 7.0


def test_memory_lives_as_long_as_someone_needs_it() -> None:
    sent = torch.ones(10_000)
    gone = weakref.ref(sent)
    payload = compiled(sent)
    del sent
    assert payload is not None
    assert gone() is not None  # the buffer keeps it
    got = load(payload)
    del payload
    assert gone() is None
    view = got[5:].clone()
    thread = threading.Thread(target=got.__setitem__, args=(0, 2.0))
    thread.start()
    thread.join()
    del got
    gc.collect()
    assert torch.equal(view, torch.ones(9_995))


def test_buffer_is_let_go_by_the_last_tensor() -> None:
    class Buffer(bytearray):
        pass

    payload = compiled(torch.ones(10_000))
    assert payload is not None
    memory = Buffer(payload.buffers[0])
    gone = weakref.ref(memory)
    assert SERIALIZER.plain is not None
    got = SERIALIZER.plain.load(payload.body, [memory], (), None)
    del memory
    part = got[1:]
    del got
    assert gone() is not None
    thread = threading.Thread(target=lambda tensors: tensors.clear(), args=([part],))
    del part
    thread.start()
    thread.join()
    del thread
    assert gone() is None


def test_buffer_that_can_not_be_written_is_left_to_python() -> None:
    payload = compiled(torch.ones(10_000))
    assert payload is not None
    assert SERIALIZER.plain is not None
    assert SERIALIZER.plain.load(payload.body, [bytes(40_000)], (), None) is NotImplemented
    assert torch.equal(SERIALIZER.load(payload.body, [bytes(40_000)]), torch.zeros(10_000))


# Gradients, names.


def test_tensors_get_their_history_in_order_and_only_if_all_is_plain() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    sent = {"a": [first], "b": (second, torch.ones(4))}
    attached: list[torch.Tensor] = []
    payload = compiled(sent)
    assert payload is not None
    assert payload.tensors == [first, second]
    got = load(payload, attach=attached.append)
    assert [len(tensor) for tensor in attached] == [2, 3]
    assert attached[0] is got["a"][0]
    assert attached[1] is got["b"][0]
    attached.clear()
    mixed = IN_PYTHON.dump([first, {1, 2}])
    assert load(mixed, attach=attached.append) is NotImplemented
    assert attached == []


class Here:
    def method(self) -> None:
        """Found by name."""


def test_functions_and_classes_go_by_name_where_any_pickle_may() -> None:
    named = [Here, Here.method, compiled, OrderedDict, int]
    payload = compiled(named)
    assert payload is not None
    assert load(payload) == named
    assert pickle.loads(payload.body) == named


def test_names_of_the_main_module_are_left_to_the_picklers(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None: ...

    function.__module__, function.__qualname__ = "__main__", "function"
    monkeypatch.setattr(__main__, "function", function, raising=False)
    assert compiled(function) is None


# Hostile bytes.


class Safe(MainUnpickler):
    """Finds nothing that could do harm, whatever bytes are changed."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.partition(".")[0] not in ("farcall", "torch", "collections"):
            raise pickle.UnpicklingError(f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def outcome(load: Any) -> Any:
    try:
        return load()
    except Exception as error:
        return error


def check_against_pickle(body: bytes) -> None:
    """Compare the value loaded here with the one of the safe unpickler below."""
    got = outcome(lambda: PLAIN.load(body, (), (), None))
    assert not isinstance(got, Exception), got
    if got is NotImplemented:
        return
    expected = outcome(lambda: Safe(io.BytesIO(body), buffers=()).load())
    assert repr(got) == repr(expected)


@given(VALUES, st.data())
@settings(max_examples=1000, deadline=None)
def test_broken_bytes_make_the_value_that_pickle_makes_or_none(
    value: object, data: st.DataObject
) -> None:
    halves = [SERIALIZER, IN_PYTHON]
    body = bytearray(data.draw(st.sampled_from(halves)).dump(value).body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.sampled_from(["change", "drop", "repeat", "cut"]))
        if kind == "change":
            body[at] = data.draw(
                st.integers(0, 255) | st.sampled_from(list(b"(t)}]aesuhRN.\x85\x94"))
            )
        elif kind == "drop":
            del body[at : at + data.draw(st.integers(1, 9))]
        elif kind == "repeat":
            body[at:at] = body[at : at + data.draw(st.integers(1, 9))]
        else:
            del body[at:]
        if not body:
            return
    check_against_pickle(bytes(body))


def test_frame_inside_of_a_frame_is_left_to_pickle() -> None:
    frame = b"\x95\x06" + bytes(7)
    whole = b"\x80\x05" + frame + b"J\xff\xff\xff\xff."
    twice = b"\x80\x05" + frame + frame + b"J\xff\xff\xff\xff."
    assert PLAIN.load(whole, (), (), None) == -1
    for body in (whole, twice):
        check_against_pickle(body)


REBUILD = b"\x8c\x15farcall.serde.tensors\x8c\x0erebuild_tensor\x93"
HANDLE = b"\x8c\x15farcall.serde.loading\x8c\x0eload_reference\x93"


@pytest.mark.parametrize(
    "body",
    [
        *(REBUILD, HANDLE, b"]" + REBUILD + b"a", b"}K\x01" + REBUILD + b"s", REBUILD + b"\x85"),
        *(REBUILD + b")R", REBUILD + b"NR", REBUILD + b"\x94h\x00\x85R", HANDLE + b"K\x00\x85R"),
        *(
            b"(K\x01a",
            b"N(",
            b"]K\x01t",
            b"(",
            b"t",
            b"\x86",
            b"R",
            b"s",
            b"a",
            b"e",
            b"\x94",
            b"h\x00",
        ),
        *(
            b"]\x94h\x00a",
            b"}\x94h\x00h\x00s",
            b"NN",
            b"",
            b"\x95\xff\xff",
            b"\x8c\xff",
            b"X\xff\xff",
        ),
        *(b"\x96" + b"\xff" * 8, b"\x97", b"(" * 10_000, b"N" * 10_000, b"\x8c\x01\xff"),
        b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R",
        *(
            REBUILD
            + b"(\x96"
            + bytes([n, *bytes(7)])
            + bytes(n)
            + b"\x8c\x07float32"
            + rest
            + b"tR"
            for n, rest in [
                (16, b"(K\x05t(K\x01t"),
                (16, b"K\x02\x85J\xff\xff\xff\xff\x85"),
                (16, b"K\x02K\x02\x86K\x04K\x01\x86"),
                (15, b""),
                (16, b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85K\x01\x85"),
                (16, b"K\x02\x85K\x01\x85N"),
                (16, b"K\x02\x85K\x01K\x01\x86"),
                (16, b"N)"),
                (16, b"(" + b"K\x01" * 99 + b"t(" + b"K\x01" * 99 + b"t"),
                (0, b"K\x01\x85K\x01\x85"),
            ]
        ),
    ],
)
def test_hostile_bytes(body: bytes) -> None:
    for whole in (body, b"\x80\x05" + body + b".", b"\x80\x05" + body):
        check_against_pickle(whole)


def test_capsule_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="dlpack_exchange_api"):
        _native.Plain(torch.Tensor, torch.utils.dlpack.to_dlpack(torch.ones(1)), None, None, id)
