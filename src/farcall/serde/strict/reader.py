"""Bytes of the strict format to values: see docs/protocol.md, "Strict values".

Everything that a peer says is bounded: how deep values nest, how many there are, how many follow.
No value refers to an earlier one.
"""

from __future__ import annotations

import collections
import datetime
import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall.errors import Refused
from farcall.serde.loading import load_reference
from farcall.serde.strict.arrays import array_of
from farcall.serde.strict.objects import object_of
from farcall.serde.strict.only import Only
from farcall.serde.strict.tables import TableBudget
from farcall.serde.strict.tensors import CONSTANTS, rebuilt
from farcall.serde.strict.writer import BEGIN, MAX_DEPTH, TIMES, UTF8, WIDE

_KEYS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, torch.Size),
        *(torch.dtype, torch.layout, torch.memory_format, torch.device),
        *(datetime.timedelta, *TIMES),
    )
)

_int_at = struct.Struct("<q").unpack_from
_float_at = struct.Struct("<d").unpack_from
_complex_at = struct.Struct("<dd").unpack_from
_count_at = struct.Struct("<Q").unpack_from


class Reader:
    """Reads one message.

    Args:
        only: what the peer may send.
        body: the bytes. They are copied: they may lie in memory of the peer.
        buffers: the out-of-band buffers in order.
    """

    __slots__ = ("_at", "_body", "_buffers", "_left", "_only", "_tables")

    def __init__(
        self, only: Only, body: bytes | bytearray | memoryview, buffers: Sequence[Any]
    ) -> None:
        self._only = only
        self._body = bytes(body)
        self._buffers: list[Any] = list(buffers)  # those not read yet, else None
        self._left = only.max_objects
        self._tables = TableBudget()
        self._at = len(BEGIN)

    def read(self) -> Any:
        """Return the value.

        Raises:
            Refused: there is something in it that the policy does not allow.
            ValueError, TypeError, ...: the bytes are broken.
        """
        if self._body[: len(BEGIN)] != BEGIN:
            raise Refused(
                "this worker has a policy=Only(...), and takes no pickles; the sender does not "
                "seem to know that"
            )
        value = self._value(0)
        if self._at != len(self._body):
            raise ValueError("bytes follow the value")
        return value

    def _value(self, depth: int) -> Any:
        self._begin(depth)
        (tag,) = self._take(1)
        read = _READERS.get(tag)
        if read is None:
            raise ValueError(f"there is no tag {tag}")
        return read(self, depth + 1)

    def _begin(self, depth: int) -> None:
        self._left -= 1
        if depth > MAX_DEPTH:
            raise Refused(f"this worker takes nothing that is nested more than {MAX_DEPTH} deep")
        if self._left < 0:
            raise Refused(
                f"this worker takes at most {self._only.max_objects} objects in one message: see "
                "policy=Only(max_objects=...)"
            )

    def _take(self, size: int) -> bytes:
        begin = self._at
        self._at = end = begin + size
        if end > len(self._body):
            raise ValueError("the bytes end inside of a value")
        return self._body[begin:end]

    def _count(self) -> int:
        (count,) = self._take(1)
        if count == WIDE:
            (count,) = _count_at(self._take(8))
        return count

    def _items(self, depth: int, each: int = 1) -> list[Any]:
        count = self._count() * each
        if count > len(self._body) - self._at:  # each takes a byte at least
            raise ValueError("the bytes end inside of a value")
        return [self._value(depth) for _ in range(count)]

    def _typed(self, depth: int, *kinds: type) -> Any:
        value = self._value(depth)
        if type(value) not in kinds:
            raise ValueError(f"a {type(value).__name__} where none belongs")
        return value

    def _int(self, _: int) -> int:
        return int(_int_at(self._take(8))[0])

    def _long(self, _: int) -> int:
        return int.from_bytes(self._take(self._count()), "little", signed=True)

    def _float(self, _: int) -> float:
        return float(_float_at(self._take(8))[0])

    def _complex(self, _: int) -> complex:
        return complex(*_complex_at(self._take(16)))

    def _text(self, _: int) -> str:
        return self._take(self._count()).decode(*UTF8)

    def _bytes(self, _: int) -> bytes:
        return self._take(self._count())

    def _bytearray(self, _: int) -> bytearray:
        return bytearray(self._take(self._count()))

    def _list(self, depth: int) -> list[Any]:
        return self._items(depth)

    def _tuple(self, depth: int) -> tuple[Any, ...]:
        return tuple(self._items(depth))

    def _set(self, depth: int) -> set[Any]:
        return self._tables.set_of(_keys(self._items(depth)))

    def _frozenset(self, depth: int) -> frozenset[Any]:
        return frozenset(self._set(depth))

    def _dict(self, depth: int) -> dict[Any, Any]:
        items = self._items(depth, each=2)
        return self._tables.dict_of(_keys(items[::2]), items[1::2])

    def _ordered_dict(self, depth: int) -> collections.OrderedDict[Any, Any]:
        return collections.OrderedDict(self._dict(depth))

    def _slice(self, depth: int) -> slice:
        return slice(*(self._value(depth) for _ in range(3)))

    def _range(self, depth: int) -> range:
        return range(*(self._typed(depth, int) for _ in range(3)))

    def _size(self, depth: int) -> torch.Size:
        items = self._items(depth)
        if any(type(item) is not int for item in items):
            raise ValueError("a size is no number")
        return torch.Size(items)

    def _constant(self, depth: int) -> Any:
        return CONSTANTS[self._typed(depth, str)]

    def _device(self, depth: int) -> torch.device:
        return torch.device(self._typed(depth, str))

    def _time(self, depth: int) -> Any:
        return TIMES[self._count()].fromisoformat(self._typed(depth, str))

    def _timedelta(self, depth: int) -> datetime.timedelta:
        return datetime.timedelta(*(self._typed(depth, int) for _ in range(3)))

    def _memory(self, depth: int) -> Any:
        """Bytes in the message, or one of its buffers.

        Each is read once: some readers copy it, and a message of a thousand references to one large
        buffer would take a thousand times its memory.
        """
        if self._body[self._at : self._at + 1] != b"x":
            return self._typed(depth, bytes, bytearray)
        self._at += 1
        index = self._count()
        buffer, self._buffers[index] = self._buffers[index], None
        if buffer is None:
            raise ValueError("a buffer is read twice")
        return buffer

    def _array(self, depth: int) -> Any:
        return array_of(self._typed(depth, str), self._typed(depth, tuple), self._memory(depth))

    def _scalar(self, depth: int) -> Any:
        return self._array(depth)[()]

    def _tensor(self, depth: int) -> torch.Tensor:
        return rebuilt(self._count(), self._part(depth))

    def _part(self, depth: int) -> Any:
        """Read a value, whose buffers may be in a tuple."""
        following = self._body[self._at : self._at + 1]
        if following == b"x":
            return self._memory(depth)
        if following != b"t":
            return self._value(depth)
        self._begin(depth)
        self._at += 1
        return tuple([self._part(depth + 1) for _ in range(self._count())])

    def _reference(self, _: int) -> Any:
        return load_reference(self._count())

    def _named(self, depth: int) -> Any:
        return self._only.find(self._typed(depth, str))

    def _object(self, depth: int) -> Any:
        name = self._typed(depth, str)
        return object_of(name, self._value(depth), self._only)


def _keys(keys: list[Any]) -> list[Any]:
    """Keys of a dict or members of a set, checked.

    Raises:
        Refused: one is no plain value.
    """
    for key in keys:
        _check_key(key)
    return keys


def _check_key(key: Any) -> None:
    kind = type(key)
    # The members of a frozenset were checked when it was read, and are hashed once.
    if kind in _KEYS or kind is frozenset or isinstance(key, enum.Enum):
        return
    if kind is not tuple:
        raise Refused(
            f"this worker takes plain values only as keys of a dict or members of a set, and no "
            f"{kind.__name__}"
        )
    for part in key:
        _check_key(part)


_READERS: dict[int, Callable[[Reader, int], Any]] = {
    ord(tag): read
    for tag, read in {
        "N": lambda self, _: None,
        "0": lambda self, _: False,
        "1": lambda self, _: True,
        ".": lambda self, _: ...,
        "i": Reader._int,
        "I": Reader._long,
        "d": Reader._float,
        "c": Reader._complex,
        "s": Reader._text,
        "b": Reader._bytes,
        "B": Reader._bytearray,
        "l": Reader._list,
        "t": Reader._tuple,
        "e": Reader._set,
        "f": Reader._frozenset,
        "m": Reader._dict,
        "o": Reader._ordered_dict,
        ":": Reader._slice,
        "r": Reader._range,
        "z": Reader._size,
        "y": Reader._constant,
        "v": Reader._device,
        "D": Reader._time,
        "p": Reader._timedelta,
        "a": Reader._array,
        "g": Reader._scalar,
        "T": Reader._tensor,
        "R": Reader._reference,
        "n": Reader._named,
        "O": Reader._object,
    }.items()
}
