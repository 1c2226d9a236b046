"""Strict values: what they carry, and that no bytes make a worker do what its policy forbids."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import operator
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.errors import PeerLost, Refused, SerializationError
from farcall.ids import WorkerInfo
from farcall.serde import Only, Serializer, load_reference
from farcall.serde.strict.tables import MOST_EQUAL_HASHES
from farcall.serde.strict.writer import BEGIN, MAX_DEPTH

SERIALIZER = Serializer()
HERE = __name__


class Color(enum.Enum):
    RED = 1


class Permissions(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclasses.dataclass
class Config:
    size: int
    name: str = "a"

    def __init__(self, *_: object) -> None:
        raise AssertionError("it was called")

    __setstate__ = __init__


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    size: int


class Message(msgspec.Struct):
    text: str
    number: int = 0


class Plain:
    def __init__(self) -> None:
        self.value = [1]

    def method(self) -> int:
        return 1

    @property
    def prop(self) -> int:
        return 1


class OwnError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)


TYPES = (Color, Permissions, Point, Config, Slotted, Message, Plain, OwnError, Net, torch.nn.Linear)
EVERYTHING = Only([operator.add, torch.add, torch.nn.functional.relu, Plain.method], TYPES)


def write(value: Any) -> tuple[bytes, list[bytearray]]:
    payload = SERIALIZER.dump(value, strict=True)
    return payload.body, [bytearray(one) for one in payload.buffers]


def read(body: bytes, *buffers: Any, only: Only = EVERYTHING) -> Any:
    return SERIALIZER.load(body, buffers, only=only)


def travel(value: Any, only: Only = EVERYTHING) -> Any:
    body, buffers = write(value)
    return read(body, *buffers, only=only)


def a_config() -> Config:
    made = object.__new__(Config)
    made.size, made.name = 3, "b"
    return made


# Values that travel -----------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.just(...)
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.sampled_from([Color.RED, torch.float32, torch.device("cpu"), torch.Size([1, 2]), range(3)])
)
KEYS = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(KEYS, max_size=3)
        | st.builds(slice, inner, inner, inner)
        | st.builds(Point, st.integers(), inner)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
        | inner.map(lambda value: Message("x", value))
    ),
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_strict_values_arrive_as_they_were(value: Any) -> None:
    assert travel(value) == value


@pytest.mark.parametrize(
    "value",
    [
        *(bytearray(b"x"), bytearray(300), b"y" * 300, "é" * 300, "\ud800", 2**63, -(2**63) - 1),
        *(float("inf"), torch.strided, torch.channels_last, WorkerInfo("w", 1)),
        *(Permissions.READ, Permissions.READ | Permissions.WRITE, Point(1, [2]), Slotted(1)),
        *(a_config(), Message("a", 1), operator.add, torch.add, torch.nn.functional.relu),
        *(numpy.float32(1.5), numpy.datetime64("2020-01-01"), numpy.str_("a"), numpy.bool_(True)),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        collections.OrderedDict(b=1, a=2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_arrives_as_itself(value: Any) -> None:
    got = travel(value)
    assert type(got) is type(value)
    assert got == value


X = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "make",
    [
        *(X.clone, X.t, lambda: X[::2, 1:], lambda: X[:1].expand(5, 6), lambda: torch.zeros(0, 3)),
        *(lambda: torch.tensor(3), lambda: torch.randn(100_000), lambda: X.to(torch.bfloat16)),
        *(lambda: torch.randn(3, dtype=torch.complex64).conj(), lambda: torch.tensor(True)),
        *(X.to_sparse, X.to_sparse_csr, X.to_sparse_csc, lambda: X.to_sparse_bsr((2, 2))),
        *(lambda: torch.nn.Parameter(X.clone()), lambda: X.clone().requires_grad_()),
        lambda: torch.nn.Parameter(X.clone(), requires_grad=False),
    ],
)
def test_tensors_arrive_as_they_were(make: Callable[[], torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sent = make()
        got = travel(sent)
        assert type(got) is type(sent)
        assert (got.layout, got.dtype, got.requires_grad) == (
            *(sent.layout, sent.dtype),
            sent.requires_grad,
        )
        if sent.layout is torch.strided:
            assert torch.equal(got, sent)
            assert got.stride() == sent.stride()
        else:
            assert torch.equal(got.to_dense(), sent.to_dense())


@pytest.mark.parametrize(
    "array",
    [
        *(numpy.arange(6).reshape(2, 3), numpy.arange(6.0).reshape(2, 3).T, numpy.array(3)),
        *(numpy.zeros((0, 3)), numpy.array(["ab", "c"]), numpy.array([True, False])),
        *(numpy.arange(100_000.0), numpy.array([b"x"]), numpy.array(["2020-01-01"], "M8[D]")),
        numpy.arange(3, dtype=">i4"),
    ],
)
def test_arrays_arrive_as_they_were_with_memory_of_their_own(array: Any) -> None:
    body, buffers = write(array)
    got = read(body, *buffers)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    assert (got == array).all()
    assert got.flags.writeable


def test_modules_and_errors_arrive_without_running_their_constructors() -> None:
    sent = Net()
    got = travel(sent)
    assert torch.equal(got.layer(torch.ones(2)), sent.layer(torch.ones(2)))
    error = travel(OwnError(3))
    assert (type(error), error.args, error.code) == (OwnError, ("code 3",), 3)
    for sent_error in (
        *(ValueError("x", 1), OSError(2, "no", "file"), PeerLost("w", "gone")),
        *(UnicodeDecodeError("utf8", b"abc", 1, 2, "r"), KeyError(1)),
        ExceptionGroup("g", [ValueError(1)]),
    ):
        got_error = travel(sent_error)
        assert (type(got_error), str(got_error)) == (type(sent_error), str(sent_error))


def test_tensors_attributes_and_attachment_go_along() -> None:
    met: list[torch.Tensor] = []

    def attach(tensor: torch.Tensor) -> torch.Tensor:
        met.append(tensor)
        return tensor.requires_grad_()

    a, b = torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    payload = SERIALIZER.dump([a, {"b": b}], strict=True)
    assert [one is two for one, two in zip(payload.tensors, (a, b), strict=True)] == [True, True]
    got = SERIALIZER.load(payload.body, attach=attach, only=EVERYTHING)
    assert [m is g for m, g in zip(met, (got[0], got[1]["b"]), strict=True)] == [True, True]


# Values that do not travel ----------------------------------------------------------------------


class OwnReduction:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


@pytest.mark.parametrize(
    "value",
    [
        *(lambda: 1, OwnReduction(), Serializer(), open, sys.stdin, type("Local", (), {})),
        *(torch.ones(2).to("meta"), numpy.array([object()]), iter([]), torch.Generator()),
        *(collections.deque(), numpy.zeros(2, "i4,i4"), torch.ones(2).untyped_storage()),
    ],
)
def test_a_value_that_is_not_plain_is_not_sent(value: Any) -> None:
    with pytest.raises((SerializationError, Refused)):
        travel([value], Only())


def test_a_value_that_contains_itself_is_not_sent() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SerializationError, match="contains itself"):
        write(endless)


# Attacks ----------------------------------------------------------------------------------------


def nested(tag: bytes, depth: int, end: bytes = b"N") -> bytes:
    return BEGIN + tag * depth + end


DEEP = {
    "tuples": nested(b"t\x01", 10**6),
    "lists": nested(b"l\x01", 10**6),
    "dict keys": BEGIN + b"m\x01" + b"t\x01" * 10**6 + b"NN",
    "frozensets": nested(b"f\x01", 10**6),
    "slices": BEGIN + b":" * 10**6 + b"N" * (2 * 10**6 + 1),
    "dicts": BEGIN + b"m\x01N" * 10**6 + b"N",
    "ordered dicts": BEGIN + b"o\x01N" * 10**6 + b"N",
    "objects": BEGIN + (b"Os" + bytes([len(HERE) + 6]) + HERE.encode() + b":Point") * 10**5 + b"N",
    "tensors": BEGIN + b"T\x00" * 10**6,
    "tensors in tensors": BEGIN + (b"T\x04t\x02") * 10**6,
    "parts of tensors": BEGIN + b"T\x00" + b"t\x01" * 10**6,
    "attributes": BEGIN + b"T\x06t\x03" * 10**6,
    "arrays": BEGIN + b"a" * 10**6,
    "ranges": BEGIN + b"r" * 10**6,
    "names": BEGIN + b"n" * 10**6,
    "sizes": BEGIN + b"z\x01" * 10**6,
}


@pytest.mark.parametrize("kind", DEEP)
def test_nothing_that_nests_too_deep_is_read(kind: str) -> None:
    with pytest.raises((Refused, SerializationError)):
        read(DEEP[kind])


def test_as_much_nesting_as_is_allowed_is_harmless() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    got = travel(value)
    assert got == value
    assert hash(got) == hash(value)
    assert travel({value[0]: 1}) == {value[0]: 1}
    with pytest.raises(SerializationError):
        write((value,))


@pytest.mark.parametrize("tag", b"Isbtlfemoz")
def test_memory_is_not_taken_as_it_is_announced(tag: int) -> None:
    for count in (254, 2**32, 2**62, 2**64 - 1):
        announced = struct.pack("<BQ", 255, count) if count > 254 else bytes([count])
        with pytest.raises(SerializationError):
            read(BEGIN + bytes([tag]) + announced + b"N" * 10)


def test_objects_are_counted() -> None:
    small = Only(max_objects=10)
    assert travel([None] * 9, small) == [None] * 9
    for value in ([None] * 10, [[[]] * 5] * 5, {n: n for n in range(6)}, (torch.ones(1),) * 4):
        with pytest.raises(Refused, match="at most 10 objects"):
            travel(value, small)
    body = BEGIN + b"T\x00" + b"t\xff" + struct.pack("<Q", 10**7) + b"t\x00" * 10**7
    with pytest.raises(Refused, match="at most 1000000 objects"):
        read(body, only=Only())


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"\x80\x05N.",
            b"\x80\x04N.",
            pickle.dumps(OwnReduction()),
            b"N",
            b"\x00N",
            b"\x02N",
        ),
        b"\x80\x05r\xff\xff\xff\x7f.",  # LONG_BINPUT
        *(
            BEGIN,
            BEGIN + b"NN",
            BEGIN + b"?",
            BEGIN + b"\x80\x05N.",
            BEGIN + b"q",
            BEGIN + b"x\x00",
        ),
        *(BEGIN + b"R\x00", BEGIN + b"i\x00", BEGIN + b"s\x02\xff\xff", BEGIN + b"y" + b"s\x01z"),
    ],
)
def test_bytes_of_no_strict_value_are_refused(body: bytes) -> None:
    with pytest.raises((Refused, SerializationError)):
        read(body, bytearray(8))


@pytest.mark.parametrize(
    "key",
    [
        [],
        {},
        set(),
        torch.ones(1),
        Plain(),
        Slotted(1),
        Point(1),
        slice(1),
        bytearray(),
        operator.add,
    ],
)
def test_keys_are_plain_values(key: Any) -> None:
    body, _ = write(key)
    for tag, rest in ((b"m\x01", b"N"), (b"e\x01", b""), (b"f\x01", b""), (b"o\x01", b"N")):
        for before in (b"", b"t\x01"):
            with pytest.raises((Refused, SerializationError)):
                read(BEGIN + tag + before + body[1:] + rest)


def test_many_keys_of_one_hash_are_refused() -> None:
    prime = sys.hash_info.modulus
    few = [n * prime for n in range(MOST_EQUAL_HASHES)]
    assert len(travel(set(few))) == len(few)
    keys = [n * prime for n in range(MOST_EQUAL_HASHES + 1)]
    assert len(set(map(hash, keys))) == 1
    for value in (set(keys), frozenset(keys), dict.fromkeys(keys)):
        with pytest.raises(Refused, match="of one hash"):
            travel(value)


@pytest.mark.parametrize(
    ("value", "only"),
    [
        (Color.RED, Only(types=[Permissions])),
        (Point(1), Only(types=[Slotted])),
        (a_config(), Only([Config])),
        (Message("a"), Only()),
        (Plain(), Only()),
        (OwnError(1), None),
        (Net(), Only(types=[Net])),  # and not of its part
        (operator.add, Only([operator.sub])),
        (Point, Only(types=[Point])),  # objects of it, and not the class
        (os.system, Only()),
        (eval, Only()),
    ],
)
def test_a_name_that_is_not_listed_is_refused(value: Any, only: Only | None) -> None:
    with pytest.raises(Refused, match="Only"):
        travel([value], only or Only())


def an_object(name: str, parts: Any) -> bytes:
    return BEGIN + b"O" + write(f"{HERE}:{name}")[0][1:] + write(parts)[0][1:]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *(("Plain", {name: 1}) for name in ("method", "prop", "__class__", "__dict__", "__init__")),
        *(("Plain", parts) for parts in ([], (), 1, None, {1: 2}, {b"a": 1})),
        *(("Slotted", {"other": 1}), ("Slotted", {"__setattr__": 1}), ("Point", (1, 2, 3))),
        *(("Point", [1, 2]), ("Point", {"x": 1}), ("Color", 1), ("Color", "__class__")),
        *(("Permissions", "x"), ("Permissions", 1.5), ("Message", {"other": 1}), ("Message", ())),
        *(("OwnError", ()), ("OwnError", ((), {"with_traceback": 1})), ("OwnError", (1, {}))),
        *(("OwnError", ((), {"__class__": 1})), ("OwnError", ((), {"__traceback__": 1}))),
        *(("Net", {"forward": 1}), ("Net", {"__call__": 1}), ("Net", {"_call_impl": 1})),
    ],
)
def test_state_may_not_stand_for_code(name: str, parts: Any) -> None:
    with pytest.raises((Refused, SerializationError)):
        read(an_object(name, parts))


@pytest.mark.parametrize("start", [-(10**12), -1, 4, 10**12])
@pytest.mark.parametrize("end", [-1, 0, 2, 10**12])
def test_positions_of_unicode_errors_are_checked(start: int, end: int) -> None:
    """`str` of such an error reads at its position without looking: a crash."""
    for kind, text in (("UnicodeDecodeError", b"abc"), ("UnicodeEncodeError", "abc")):
        args = ("utf8", text, start, end, "r")
        name = write(f"builtins:{kind}")[0][1:]
        for parts in ((args, {}), (("utf8", text, 0, 1, "r"), {"start": start, "end": end})):
            with pytest.raises((Refused, SerializationError)):
                read(BEGIN + b"O" + name + write(parts)[0][1:])


def a_tensor(number: int, *parts: Any) -> bytes:
    return BEGIN + b"T" + bytes([number]) + write(parts)[0][1:]


HOSTILE_TENSORS = [
    *(
        (0, bytearray(16), "float32", shape, stride)
        for shape, stride in [
            ((5,), (1,)),
            ((2,), (-1,)),
            ((-1,), (1,)),
            ((2, 2), (4, 1)),
            ((2**62, 4), (0, 0)),
            ((1,) * 65, (0,) * 65),
            ((2,), (1, 1)),
            ((2**64,), (0,)),
            ((1.5,), (1,)),
            (2, 1),
            ((0, 2**62, 4), (0, 0, 0)),
            ((0,), (2**64,)),
            ((True,), (1,)),
            ([2], [1]),
            (("a",), (1,)),
        ]
    ),
    (0, bytearray(15), "float32"),
    (0, bytearray(16), "no"),
    (0, bytearray(16), 5),
    (0, bytearray(16), "strided"),
    (0, [1, 2], "float32"),
    (0, "text", "float32"),
    (0, numpy.zeros(2), "float32"),
    (0, bytearray(), "float32", (1 << 40,), (1,)),
    (1, 5, True, True),
    (1, [torch.ones(1)], True, True),
    (2, torch.tensor([[0, 10**15]]), torch.ones(2), (3,), False),
    (2, torch.tensor([[0, -1]]), torch.ones(2), (3,), False),
    (2, torch.tensor([[1, 0]]), torch.ones(2), (3,), True),
    (2, torch.tensor([[0, 1]]), torch.ones(2), (2**62, 2**62), False),
    (2, 1, 2, 3, 4),
    (3, "sparse_csr", torch.tensor([0, 9]), torch.tensor([0]), torch.ones(1), (1, 1)),
    (3, "sparse_csr", torch.tensor([0, 1]), torch.tensor([10**12]), torch.ones(1), (1, 1)),
    (3, "other", torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1)),
    (4, torch.ones(1), "nowhere"),
    (5, bytearray(8), "float32", (1,), (1,), "cpu"),
    (6, 0, (bytearray(4), "float32"), {"expand": 1}),
    (6, 0, (bytearray(4), "float32"), {1: 1}),
    (6, 6, (), {}),
    (7,),
    (0,),
]


@pytest.mark.parametrize("parts", HOSTILE_TENSORS, ids=str)
def test_tensors_that_are_none_are_refused(parts: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((Refused, SerializationError)):
            read(a_tensor(*parts))


@pytest.mark.parametrize(
    "parts",
    [
        *(
            ("O", (1,), bytes(8)),
            ("<f4", (2,), bytes(4)),
            ("<f4", (-1,), b""),
            ("<f4", (1,), "abcd"),
        ),
        *(
            ("<U0", (10**12,), b""),
            ("<f4,<f4", (1,), bytes(8)),
            ("V8", (1,), bytes(8)),
            ("f4", 1, b""),
        ),
        *(("<f16", (1,), bytes(16)), ("<f4", (2**62, 4), b""), ("|O8", (1,), bytes(8))),
    ],
)
def test_arrays_that_are_none_are_refused(parts: tuple[Any, ...]) -> None:
    with pytest.raises((Refused, SerializationError)):
        read(BEGIN + b"a" + b"".join(write(part)[0][1:] for part in parts))


@pytest.mark.parametrize("layout", ["sparse", "sparse_csr"])
def test_indices_that_are_changed_after_the_check_have_no_effect(layout: str) -> None:
    """Write to the memory that both programs have mapped, after the check."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = torch.eye(5000)
        sent = dense.to_sparse() if layout == "sparse" else dense.to_sparse_csr()
        body, buffers = write(sent)
        assert buffers
        got = read(body, *buffers)
        for buffer in buffers:
            buffer[:] = b"\x7f" * len(buffer)
        assert torch.equal(got.to_dense(), dense)


def test_only_dense_tensors_lie_over_the_arrived_buffers() -> None:
    body, buffers = write(torch.zeros(10_000))
    got = read(body, *buffers)
    buffers[0][:] = b"\x01" * len(buffers[0])
    assert got[0] != 0
    for place in (b"l\x01x\x00", b"m\x01Nx\x00", b"t\x01x\x00", b"x\x00"):
        with pytest.raises(SerializationError):
            read(BEGIN + place, bytearray(8))


def test_references_are_those_that_the_message_brought() -> None:
    got = SERIALIZER.load(BEGIN + b"R\x00", references=["first"], only=Only())
    assert got == "first"
    with pytest.raises(SerializationError):
        SERIALIZER.load(BEGIN + b"R\x01", references=["first"], only=Only())
    with pytest.raises(LookupError):
        load_reference(0)


def test_no_module_is_imported_for_a_refused_value() -> None:
    for name in ("antigravity:webbrowser", "this:s"):
        for tag in (b"n", b"O"):
            with pytest.raises(Refused):
                read(BEGIN + tag + write(name)[0][1:] + b"N")
    assert not {"antigravity", "this"} & sys.modules.keys()
