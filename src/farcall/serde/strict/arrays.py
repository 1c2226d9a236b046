"""Arrays of numpy in strict values, where numpy is installed."""

from __future__ import annotations

import math
import pickle
import re
from typing import TYPE_CHECKING, Any

from farcall.errors import SerializationError
from farcall.serde.strict.tensors import check_shape
from farcall.serde.tensors import INLINE_BYTES

if TYPE_CHECKING:
    import numpy
else:
    try:
        import numpy
    except ModuleNotFoundError:  # then no value here is an array
        numpy = None

# Kinds of dtypes whose elements are plain numbers, texts, bytes and times.
_PLAIN_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c(8|16)|[SU]\d{1,9}|[mM]8(\[\w{1,12}\])?)")
ARRAYS: tuple[type, ...] = (numpy.ndarray,) if numpy else ()
SCALARS: tuple[type, ...] = (numpy.generic,) if numpy else ()


def array_parts(value: Any) -> tuple[str, tuple[int, ...], Any]:
    """Return the dtype, the shape and the memory of an array or a scalar.

    Raises:
        SerializationError: its elements are no plain numbers, texts, bytes or times.
    """
    array = numpy.asarray(value)
    if not _PLAIN_DTYPE.fullmatch(array.dtype.str) or array.dtype.names is not None:
        raise SerializationError(
            f"an array of dtype {array.dtype} does not travel to a worker with a policy"
        )
    if not array.dtype.itemsize:  # of empty texts only
        array = array.astype(array.dtype.kind + "1")
    flat = numpy.ascontiguousarray(array).reshape(-1)
    if flat.nbytes < INLINE_BYTES:
        return array.dtype.str, array.shape, flat.tobytes()
    return array.dtype.str, array.shape, pickle.PickleBuffer(flat.view(numpy.uint8).data)


def array_of(dtype: Any, shape: Any, data: Any) -> numpy.ndarray[Any, Any]:
    """Return the array of these parts; its memory is its own.

    Raises:
        ValueError, TypeError: they are those of no array, or numpy is not installed.
    """
    if numpy is None:
        raise ValueError("an array, and numpy is not installed here")
    if type(dtype) is not str or not _PLAIN_DTYPE.fullmatch(dtype):
        raise ValueError(f"there are no arrays of dtype {dtype!r:.40}")
    if not isinstance(data, bytearray | memoryview | bytes):
        raise ValueError("an array's memory is no bytes")
    kind = numpy.dtype(dtype)
    check_shape(shape)
    if math.prod(shape) * kind.itemsize != len(data) or not kind.itemsize:
        raise ValueError("an array of another size than its shape")
    made = numpy.frombuffer(bytearray(data), kind) if len(data) else numpy.zeros(0, kind)
    if kind.kind == "b":  # of bytes that are 0 and 1, whatever came
        made = made.view(numpy.uint8) != 0
    return made.reshape(shape)
