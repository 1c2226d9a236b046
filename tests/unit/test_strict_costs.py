"""The costs of a peer's bytes at a worker with a policy: memory, time, files that are opened."""

from __future__ import annotations

import enum
import itertools
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farcall.errors import Refused, SerializationError
from farcall.serde import Only, Serializer, StoredError, load_failure
from farcall.serde.strict import tables
from farcall.serde.strict.fields import MOST_COLUMNS, MOST_COMBINATIONS
from farcall.serde.strict.tables import MOST_EQUAL_HASHES, TableBudget
from farcall.serde.strict.writer import BEGIN
from farcall.wire.messages import Failure

SERIALIZER = Serializer()


class Bits(enum.Flag):
    _ignore_ = ["number"]
    for number in range(16):
        vars()[f"BIT_{number}"] = 1 << number


class Open(enum.IntFlag, boundary=enum.KEEP):
    ONE = 1


ONLY = Only(types=[Bits, Open])


def inside(value: Any) -> bytes:
    """Return the bytes of a value inside of another one."""
    return SERIALIZER.dump(value, strict=True).body[len(BEGIN) :]


def read(body: bytes, *buffers: Any) -> Any:
    return SERIALIZER.load(BEGIN + body, buffers, only=ONLY)


# Tables -----------------------------------------------------------------------------------------


def clock_of(seconds: float) -> Callable[[], float]:
    """Return a clock on which so many seconds pass between two looks."""
    return itertools.count(0.0, seconds).__next__


MANY = list(range(10 * tables.BATCH))
BUILD = (
    lambda budget: budget.dict_of(MANY, MANY) == dict(zip(MANY, MANY, strict=True)),
    lambda budget: budget.set_of(MANY) == set(MANY),
)


@pytest.mark.parametrize("build", BUILD, ids=["dict", "set"])
def test_table_that_takes_too_long_is_refused(build: Callable[[TableBudget], bool]) -> None:
    assert build(TableBudget(clock_of(tables.SECONDS / 11)))
    with pytest.raises(Refused, match="takes seconds to build"):
        build(TableBudget(clock_of(tables.SECONDS / 9)))


@pytest.mark.parametrize("build", BUILD, ids=["dict", "set"])
def test_tables_of_one_message_share_their_time(build: Callable[[TableBudget], bool]) -> None:
    budget = TableBudget(clock_of(tables.SECONDS / 25))
    assert build(budget)
    assert build(budget)
    with pytest.raises(Refused, match="takes seconds to build"):
        build(budget)


def test_search_for_equal_hashes_builds_no_table_of_them() -> None:
    """Build no table of the hashes, which would be as slow as the guarded one."""
    hashes: list[int] = []

    class Key(int):
        def __hash__(self) -> int:
            hashes.append(int(self))
            return int(self)

    with pytest.raises(Refused, match="takes seconds to build"):
        TableBudget(clock_of(tables.SECONDS + 1)).set_of([Key(n) for n in MANY])
    assert len(hashes) == len(MANY) + tables.BATCH


def test_few_keys_of_one_hash_are_no_attack() -> None:
    keys = [n * (2**61 - 1) for n in range(MOST_EQUAL_HASHES)] + list(range(1, 1000))
    assert TableBudget().set_of(keys) == set(keys)
    assert TableBudget().dict_of(keys, keys) == dict(zip(keys, keys, strict=True))


# Tensors and buffers ----------------------------------------------------------------------------

MANY_ELEMENTS = 1 << 50  # more than any machine has memory for


def repeated(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return a tensor whose elements are all the same one."""
    return b"T\x00" + inside((bytearray(16), dtype, shape, (0,) * len(shape)))


def sparse(number: int, *parts: bytes) -> bytes:
    return b"T" + bytes([number]) + b"t" + bytes([len(parts)]) + b"".join(parts)


EMPTY = inside(torch.zeros(0))
NO_INDICES = inside(torch.zeros(0, dtype=torch.int64))
FROM_NOTHING = {
    "indices": (2, repeated("int64", (1, MANY_ELEMENTS)), EMPTY, inside((3,)), b"0"),
    "values": (
        *(2, inside(torch.zeros(1, 1, dtype=torch.int64)), repeated("float32", (1, MANY_ELEMENTS))),
        *(inside((3, MANY_ELEMENTS)), b"0"),
    ),
    "counted and without memory": (
        *(2, inside(torch.zeros(0, MANY_ELEMENTS, dtype=torch.int64))),
        *(inside(torch.zeros(MANY_ELEMENTS, 0)), inside((0,)), b"1"),
    ),
    "rows": (
        *(3, inside("sparse_csr"), repeated("int64", (MANY_ELEMENTS + 1,)), NO_INDICES, EMPTY),
        inside((MANY_ELEMENTS, 1)),
    ),
    "blocks": (
        *(3, inside("sparse_bsr"), inside(torch.tensor([0, 1])), inside(torch.tensor([0]))),
        *(repeated("float32", (1, 1 << 25, 1 << 25)), inside((1 << 25, 1 << 25))),
    ),
    "on a device": (4, repeated("float32", (MANY_ELEMENTS,)), inside("cpu")),
}


@pytest.mark.parametrize("kind", FROM_NOTHING)
def test_sparse_tensors_have_no_more_elements_than_arrived(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SerializationError) as caught:
            read(sparse(*FROM_NOTHING[kind]))
    assert type(caught.value.__cause__) is ValueError, caught.value.__cause__


def test_sparse_tensor_whose_values_are_one_element_arrives() -> None:
    sent = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(1).expand(2), (3,))
    assert torch.equal(read(inside(sent)).to_dense(), torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    "value",
    [
        b"a" + inside("|u1") + inside((8,)) + b"x\x00",
        b"T\x00t\x02x\x00" + inside("uint8"),
    ],
    ids=["array", "tensor"],
)
def test_a_buffer_is_read_once(value: bytes) -> None:
    assert read(value, bytearray(8)).sum() == 0
    with pytest.raises(SerializationError):
        read(b"l\x02" + value * 2, bytearray(8))


# Enums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Bits, Open])
@pytest.mark.parametrize("sign", [1, -1])
def test_class_of_flags_keeps_a_bounded_number_of_combinations(
    kind: type[enum.Flag], sign: int
) -> None:
    name = inside(f"{__name__}:{kind.__name__}")
    before = len(kind._value2member_map_)
    refused = 0
    for number in range(1, MOST_COMBINATIONS + 100):
        try:
            read(b"O" + name + inside(sign * number))
        except (Refused, SerializationError):
            refused += 1
    assert refused >= (50 if before < MOST_COMBINATIONS else 0)
    assert len(kind._value2member_map_) <= MOST_COMBINATIONS + 2 + len(kind)
    # Those that it keeps arrive still, and are the same.
    assert read(b"O" + name + inside(1)) is kind(1)


# Errors -----------------------------------------------------------------------------------------


def an_error(name: str, args: Any, state: Any) -> bytes:
    return b"O" + inside(f"builtins:{name}") + inside((args, state))


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


LONG = 10**9
FIELDS = ("lineno", "offset", "end_lineno", "end_offset")


@pytest.mark.parametrize("name", ["SyntaxError", "IndentationError", "TabError"])
@pytest.mark.parametrize("number", ["10**9", "-(10**9)", "10**5000", "-(10**5000)", "1 << 63"])
def test_positions_of_syntax_errors_are_cut(name: str, number: str) -> None:
    for place in itertools.product((1, eval(number)), repeat=4):
        check_place(name, place)


def check_place(name: str, place: tuple[int, ...]) -> None:
    line, column, last_line, last_column = place
    as_argument = (("no", ("a.py", line, column, "x = (", last_line, last_column)), {})
    as_attributes = (("no",), {"text": "x = (", **dict(zip(FIELDS, place, strict=True))})
    for args, state in (as_argument, as_attributes):
        got = read(an_error(name, args, state))
        # As it is, and as a future raises it.
        for error in (got, StoredError(got).error()):
            assert len(printed(error)) < 2 * MOST_COLUMNS


@pytest.mark.parametrize("value", [[1], b"a", 1.5, "a", {}, (), 5, ["a"]])
@pytest.mark.parametrize("field", [*FIELDS, "text", "filename", "msg", "print_file_and_line"])
def test_any_syntax_error_can_be_printed(field: str, value: Any) -> None:
    try:
        got = read(an_error("SyntaxError", ("no", ("a.py", 1, 1, "x", 1, 2)), {field: value}))
    except (Refused, SerializationError):
        return
    assert "SyntaxError" in printed(got)


def test_syntax_errors_arrive_as_they_are() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = (\n", "a.py", "exec")
    got = read(inside(caught.value))
    assert got.args == caught.value.args
    assert [getattr(got, name) for name in FIELDS] == [
        getattr(caught.value, name) for name in FIELDS
    ]
    assert printed(got).splitlines()[-4:] == printed(caught.value).splitlines()[-4:]


def test_arguments_are_no_attribute() -> None:
    """Refuse `args` as an attribute: a copy of the exception would be made of it, unchecked."""
    for name, args in (("UnicodeDecodeError", ("u", b"a", 0, 1, "r")), ("ValueError", ())):
        with pytest.raises(Refused):
            read(an_error(name, args, {"args": ("u", b"a", -LONG, LONG, "r")}))


def test_import_error_names_no_module_to_look_in() -> None:
    got = read(an_error("ImportError", ("no",), {"name": "this", "name_from": "s"}))
    assert got.name == "this"
    assert getattr(got, "name_from", None) is None


ODD_NAMES = ["a\0b.py", "\0", "\ud800.py", "a\udfffb", "\udc80", "", "a\nb", "x" * 5000, "<a\0>"]


@pytest.mark.parametrize("only", [None, ONLY], ids=["anything", "policy"])
@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_errors_with_odd_names_in_their_frames_can_be_printed(name: str, only: Only | None) -> None:
    for frame in ((name, "f", 1), ("a.py", name, 1), (name, name, 1)):
        failure = Failure("mod.Type", "text", "the traceback", frames=(frame,))
        earlier = ((True, "mod.Earlier", "text", (frame,), b""),)
        failure.earlier = earlier
        got = load_failure(SERIALIZER, failure, b"", worker="w1", only=only)
        for error in (got, StoredError(got).error()):
            assert "mod.Type" in printed(error).encode().decode()
            assert error.__traceback__ is not None


def test_files_that_a_peer_names_are_not_opened_under_a_policy() -> None:
    failure = Failure("mod.Type", "text", "the traceback", frames=((__file__, "f", 1),))
    line = '"""The costs of a peer'
    assert line in printed(load_failure(SERIALIZER, failure, b"", worker="w1"))
    under_policy = printed(load_failure(SERIALIZER, failure, b"", worker="w1", only=ONLY))
    assert line not in under_policy
    assert f'"<{__file__}>", line 1, in f' in under_policy
    assert "the traceback" in under_policy  # with the lines of code that the peer has
