"""Tensors in strict values: what they are made of, and checked before it is used.

They are taken apart as for a pickle (`farcall.serde.tensors`). A check only looks at values
of the reader: numbers, and copies of indices. Only the contents of a dense tensor are the memory
that arrived, which a peer of the same host may still write to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from farcall.errors import SerializationError
from farcall.serde import tensors
from farcall.serde.strict.objects import check_attributes
from farcall.serde.tensors import DeviceMap

MOST_DIMENSIONS = 64
MOST_ELEMENTS = 2**63 - 1

CONSTANTS: dict[str, Any] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}
NAMES_OF_CONSTANTS = {value: str(value).removeprefix("torch.") for value in CONSTANTS.values()}


def reduced(tensor: torch.Tensor, device_map: DeviceMap | None) -> tuple[int, tuple[Any, ...]]:
    """Return how a tensor is rebuilt, a number, and of what.

    Raises:
        SerializationError: a tensor of its kind does not travel to a worker with a policy.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _unsendable(tensor)
    function, parts, *more = tensors.reduce_tensor(tensor, device_map)
    if function in _SPARSE:
        parts = tuple(_with_own_elements(part) for part in parts)
    if more:
        return _ATTRIBUTED, (function_number(function, tensor), parts, more[0])
    return function_number(function, tensor), parts


def function_number(function: Callable[..., Any], tensor: torch.Tensor) -> int:
    """Return the number of a function that rebuilds tensors."""
    number = _NUMBERS.get(function)
    if number is None:
        raise _unsendable(tensor)
    return number


def _unsendable(tensor: torch.Tensor) -> SerializationError:
    return SerializationError(
        f"{tensors.described(tensor)} does not travel to a worker with a policy: it takes dense "
        "and sparse tensors of torch.Tensor and torch.nn.Parameter"
    )


def rebuilt(number: Any, parts: Any) -> torch.Tensor:
    """Return the tensor of these parts.

    Raises:
        ValueError, TypeError, RuntimeError: they are those of no tensor.
        Refused: it has attributes that it may not have.
    """
    if type(number) is not int or type(parts) is not tuple or not 0 <= number < len(_REBUILDS):
        raise ValueError("no parts of a tensor")
    return _REBUILDS[number](*parts)


def _check_numbers(*numbers: Any) -> None:
    if any(type(number) is not int or not 0 <= number <= MOST_ELEMENTS for number in numbers):
        raise ValueError("a shape, stride or offset of a tensor is no such number")


def check_shape(shape: Any) -> None:
    """Check that this is the shape of a tensor or an array.

    Raises:
        ValueError: it is not.
    """
    if type(shape) is not tuple or len(shape) > MOST_DIMENSIONS:
        raise ValueError("no shape of a tensor")
    _check_numbers(*shape)
    if math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ValueError("a tensor of too many elements")


def _check_lies_in(size: int, dtype: torch.dtype, shape: Any, stride: Any) -> None:
    """Check that a tensor covers nothing but its memory."""
    check_shape(shape)
    if type(stride) is not tuple or len(stride) != len(shape):
        raise ValueError("no stride of a tensor")
    _check_numbers(*stride)
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > size:
        raise ValueError(f"a tensor of shape {shape} and stride {stride} needs more than {size} B")
    if 0 in shape and sum(stride) > MOST_ELEMENTS:
        raise ValueError("no stride of a tensor")


def _dtype(name: Any) -> torch.dtype:
    found = CONSTANTS.get(name) if type(name) is str else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r:.40}")
    return found


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError("the parts of a tensor are no tensors")
    return value


def _own_copy(value: Any) -> torch.Tensor:
    """Return a copy of a part of a sparse tensor, in no more memory than the part brought."""
    return _of_own_elements(value).detach().clone()


def _of_own_elements(value: Any) -> torch.Tensor:
    """Return a dense tensor each of whose elements arrived: no stride of 0 repeats one."""
    tensor = _tensor(value)
    if tensor.layout is not torch.strided:
        raise ValueError("the parts of a tensor are not dense")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"{tensor.nbytes} B of a tensor in fewer bytes than that")
    return tensor


def _with_own_elements(part: Any) -> Any:
    """Return a part of a sparse tensor to be sent, for the reader; see `_of_own_elements`."""
    if not isinstance(part, torch.Tensor) or part.nbytes <= part.untyped_storage().nbytes():
        return part
    return part.contiguous()


def _check_count(indices: torch.Tensor, values: torch.Tensor) -> None:
    """Check that what a sparse COO tensor counts takes memory, in its indices or its values."""
    counted = values.shape[0] if values.dim() else 0
    if counted > max(indices.numel(), values.numel()):
        raise ValueError("more elements of a sparse tensor than there are indices and values")


def _dense(
    data: Any, dtype: Any, shape: Any = None, stride: Any = (1,), requires_grad: Any = False
) -> torch.Tensor:
    if not isinstance(data, bytearray | memoryview | bytes):
        raise ValueError("a tensor's memory is no bytes")
    if shape is None and len(data) % _dtype(dtype).itemsize:
        raise ValueError("a tensor's memory ends inside of an element")
    counted = (len(data) // _dtype(dtype).itemsize,) if shape is None else shape
    _check_lies_in(len(data), _dtype(dtype), counted, stride)
    return tensors.rebuild_tensor(data, dtype, counted, stride, requires_grad is True)


def _leaf(data: Any, requires_grad: Any, is_parameter: Any) -> torch.Tensor:
    return tensors.rebuild_leaf(_tensor(data), requires_grad is True, is_parameter is True)


def _coo(indices: Any, values: Any, shape: Any, is_coalesced: Any) -> torch.Tensor:
    check_shape(shape)
    own = _own_copy(indices), _own_copy(values)
    _check_count(*own)
    return tensors.rebuild_coo(*own, shape, is_coalesced is True)


def _compressed(layout: Any, compressed: Any, plain: Any, values: Any, shape: Any) -> torch.Tensor:
    check_shape(shape)
    own = _own_copy(compressed), _own_copy(plain), _own_copy(values)
    return tensors.rebuild_compressed(layout, *own, shape)


def _on_device(data: Any, device: Any) -> torch.Tensor:
    return tensors.rebuild_on_device(_of_own_elements(data), str(device))


def _direct(data: Any, dtype: Any, shape: Any, stride: Any, device: Any) -> torch.Tensor:
    memory = getattr(data, "memory", None)
    own = _tensor(memory)
    size = own.nbytes
    _check_lies_in(size, _dtype(dtype), shape, stride)
    if math.prod(shape) * _dtype(dtype).itemsize > size and own.device != torch.device(device):
        raise ValueError("a tensor that takes more memory on another device than it brought")
    return tensors.rebuild_direct(data, dtype, shape, stride, str(device))


def _attributed(number: Any, parts: Any, attributes: Any) -> torch.Tensor:
    if number == _ATTRIBUTED or type(attributes) is not dict:
        raise ValueError("no attributes of a tensor")
    check_attributes(attributes, torch.nn.Parameter)
    made = rebuilt(number, parts)
    tensors.set_attributes(made, attributes)
    return made


# The position is on the wire: append, never reorder.
_REBUILDS: tuple[Callable[..., torch.Tensor], ...] = (
    _dense,
    _leaf,
    _coo,
    _compressed,
    _on_device,
    _direct,
    _attributed,
)
_SPARSE = (tensors.rebuild_coo, tensors.rebuild_compressed)
_NUMBERS: dict[Callable[..., Any], int] = {
    tensors.rebuild_tensor: 0,
    tensors.rebuild_leaf: 1,
    tensors.rebuild_coo: 2,
    tensors.rebuild_compressed: 3,
    tensors.rebuild_on_device: 4,
    tensors.rebuild_direct: 5,
}
_ATTRIBUTED = 6
