"""Values to bytes of the strict format: see docs/protocol.md, "Strict values"."""

from __future__ import annotations

import collections
import datetime
import pickle
import struct
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from farcall.errors import SerializationError
from farcall.serde.functions import name_of
from farcall.serde.strict.arrays import ARRAYS, SCALARS, array_parts
from farcall.serde.strict.objects import parts_of_object
from farcall.serde.strict.tensors import NAMES_OF_CONSTANTS, reduced
from farcall.serde.tensors import DeviceMap
from farcall.torch_internals import OpOverload, OpOverloadPacket, ScriptFunction
from farcall.wire.messages import OnDevice

MAX_DEPTH = 100
BEGIN = b"\x01"  # a pickle begins with 0x80
WIDE = 255  # a count that does not fit in a byte follows in eight
UTF8 = "utf-8", "surrogatepass"
TIMES = (datetime.datetime, datetime.date, datetime.time)

pack_int = struct.Struct("<q").pack
pack_float = struct.Struct("<d").pack
pack_complex = struct.Struct("<dd").pack
_pack_count = struct.Struct("<BQ").pack

_CALLABLES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    ScriptFunction,
    OpOverloadPacket,
    OpOverload,
)


class Writer:
    """Writes one message.

    Args:
        reference: objects of exactly this type stay out of the bytes.
        check: is called with each of them first; `write` raises its errors.
        device_map: where tensors of a device other than the CPU go to on the peer.

    Attributes:
        buffers, tensors, references: as in a `Payload`.
    """

    def __init__(
        self,
        reference: type | None,
        check: Callable[[Any], None] | None,
        device_map: DeviceMap | None,
    ) -> None:
        self._reference = reference
        self._check = check
        self._device_map = device_map
        self._parts: list[bytes] = [BEGIN]
        self._put = self._parts.append
        self.buffers: list[memoryview | OnDevice] = []
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []

    def write(self, value: Any) -> bytes:
        """Return the bytes of a value.

        Raises:
            SerializationError: something in it does not travel to a worker with a policy.
        """
        self._write(value, 0)
        return b"".join(self._parts)

    def _write(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise SerializationError(
                f"it is nested more than {MAX_DEPTH} deep, or contains itself, and the worker it "
                "goes to has a policy"
            )
        write = _WRITERS.get(type(value), Writer._other)
        write(self, value, depth + 1)

    def _count(self, tag: bytes, count: int) -> None:
        self._put(tag)
        self._put(bytes((count,)) if count < WIDE else _pack_count(WIDE, count))

    def _int(self, value: int, _: int) -> None:
        if -(2**63) <= value < 2**63:
            self._put(b"i" + pack_int(value))
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        self._count(b"I", len(data))
        self._put(data)

    def _float(self, value: float, _: int) -> None:
        self._put(b"d" + pack_float(value))

    def _complex(self, value: complex, _: int) -> None:
        self._put(b"c" + pack_complex(value.real, value.imag))

    def _text(self, value: str, _: int) -> None:
        data = value.encode(*UTF8)
        self._count(b"s", len(data))
        self._put(data)

    def _bytes(self, value: bytes | bytearray, _: int) -> None:
        self._count(b"b" if type(value) is bytes else b"B", len(value))
        self._put(bytes(value))

    def _buffer(self, value: pickle.PickleBuffer, _: int) -> None:
        view = value.raw()
        self.buffers.append(view.obj if isinstance(view.obj, OnDevice) else view)
        self._count(b"x", len(self.buffers) - 1)

    def _items(self, tag: bytes, items: Iterable[Any], count: int, depth: int) -> None:
        self._count(tag, count)
        for item in items:
            self._write(item, depth)

    def _list(self, value: list[Any], depth: int) -> None:
        self._items(b"l", value, len(value), depth)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> None:
        self._items(b"t", value, len(value), depth)

    def _set(self, value: set[Any], depth: int) -> None:
        self._items(b"e", value, len(value), depth)

    def _frozenset(self, value: frozenset[Any], depth: int) -> None:
        self._items(b"f", value, len(value), depth)

    def _dict(self, value: dict[Any, Any], depth: int) -> None:
        tag = b"m" if type(value) is dict else b"o"
        items = [item for pair in value.items() for item in pair]
        self._items(tag, items, len(value), depth)

    def _slice(self, value: slice, depth: int) -> None:
        self._put(b":")
        for part in (value.start, value.stop, value.step):
            self._write(part, depth)

    def _range(self, value: range, depth: int) -> None:
        self._put(b"r")
        for part in (value.start, value.stop, value.step):
            self._write(part, depth)

    def _size(self, value: torch.Size, depth: int) -> None:
        self._items(b"z", value, len(value), depth)

    def _constant(self, value: Any, depth: int) -> None:
        self._put(b"y")
        self._write(NAMES_OF_CONSTANTS[value], depth)

    def _device(self, value: torch.device, depth: int) -> None:
        self._put(b"v")
        self._write(str(value), depth)

    def _time(self, value: Any, depth: int) -> None:
        zone = getattr(value, "tzinfo", None)
        if type(zone) not in (type(None), datetime.timezone):
            raise SerializationError(
                f"a {type(value).__name__} in a zone of type {type(zone).__name__} does not travel "
                "to a worker with a policy: give it one of datetime.timezone"
            )
        self._count(b"D", TIMES.index(type(value)))
        self._write(value.isoformat(), depth)

    def _timedelta(self, value: datetime.timedelta, depth: int) -> None:
        self._put(b"p")
        for part in (value.days, value.seconds, value.microseconds):
            self._write(part, depth)

    def _array(self, value: Any, depth: int) -> None:
        self._put(b"a" if isinstance(value, ARRAYS) else b"g")
        for part in array_parts(value):
            self._write(part, depth)

    def _tensor(self, value: torch.Tensor, depth: int) -> None:
        if value.requires_grad:
            self.tensors.append(value)
        number, parts = reduced(value, self._device_map)
        self._count(b"T", number)
        self._write(parts, depth)

    def _other(self, value: Any, depth: int) -> None:
        if type(value) is self._reference:
            if self._check is not None:
                self._check(value)
            self.references.append(value)
            self._count(b"R", len(self.references) - 1)
        elif isinstance(value, SCALARS):
            self._array(value, depth)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, depth)
        elif isinstance(value, _CALLABLES):
            self._put(b"n")
            self._write(_name(value), depth)
        else:
            name, parts = parts_of_object(value)
            self._put(b"O")
            self._write(name, depth)
            self._write(parts, depth)


def _name(value: Any) -> str:
    name = name_of(value)
    if name is None:
        raise SerializationError(
            f"{value!r:.200} has no name by which another worker finds it, and the worker it goes "
            "to has a policy: it takes no code"
        )
    return name


_WRITERS: dict[type, Callable[[Writer, Any, int], None]] = {
    type(None): lambda self, value, _: self._put(b"N"),
    bool: lambda self, value, _: self._put(b"1" if value else b"0"),
    type(Ellipsis): lambda self, value, _: self._put(b"."),
    int: Writer._int,
    float: Writer._float,
    complex: Writer._complex,
    str: Writer._text,
    bytes: Writer._bytes,
    bytearray: Writer._bytes,
    pickle.PickleBuffer: Writer._buffer,
    list: Writer._list,
    tuple: Writer._tuple,
    set: Writer._set,
    frozenset: Writer._frozenset,
    dict: Writer._dict,
    collections.OrderedDict: Writer._dict,
    slice: Writer._slice,
    range: Writer._range,
    torch.Size: Writer._size,
    torch.dtype: Writer._constant,
    torch.layout: Writer._constant,
    torch.memory_format: Writer._constant,
    torch.device: Writer._device,
    datetime.datetime: Writer._time,
    datetime.date: Writer._time,
    datetime.time: Writer._time,
    datetime.timedelta: Writer._timedelta,
    **dict.fromkeys(ARRAYS, Writer._array),
    torch.Tensor: Writer._tensor,
    torch.nn.Parameter: Writer._tensor,
}
