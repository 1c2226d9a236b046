"""Tensors and their storages as pickle: a rebuild function, a buffer, and how to read it.

A message has the span of storage that a tensor covers, with its strides, unless the span is
mostly holes; then it has a copy. So transposed, channels_last and expanded tensors arrive as they
left, and a small view of a huge storage is a small message. Large spans leave as out-of-band
buffers over the tensor's own memory, and arrive as tensors over the received memory: writable, and
keeping that memory alive. Tensors that require grad arrive requiring grad: as leaves, or linked to
their origin by `attached`.

Strict values (`strict.tensors`) are made of the same parts, which are checked there first.
Stateless; safe from any thread.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from ctypes import string_at
from typing import Any, NamedTuple

import torch

from farcall import torch_internals as internals
from farcall.errors import SerializationError
from farcall.serde.loading import attached
from farcall.serde.notes import Notes
from farcall.serde.scripts import HiddenTensors
from farcall.serde.shared import export
from farcall.serde.sharing import HOLES_ALLOWED_BYTES
from farcall.wire.messages import OnDevice

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

# Up to this size copying into the pickle costs less than a buffer of its own in the frame.
INLINE_BYTES = 16 << 10

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MEMORY_FORMATS: dict[str, torch.memory_format] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.memory_format)
}
_COMPRESSED_LAYOUTS: dict[torch.layout, str] = {
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}
_LAYOUTS_BY_NAME = {name: layout for layout, name in _COMPRESSED_LAYOUTS.items()}
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
# How torch reduces tensors; a subclass may have a way of its own.
_OWN_REDUCTIONS = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)


class DeviceMap(NamedTuple):
    """The devices on a peer for tensors that are not on the CPU.

    Attributes:
        target: device of ours -> device of the peer; raises if it has none.
        is_direct: the way to the peer carries buffers that are `OnDevice`.
    """

    target: Callable[[torch.device], torch.device]
    is_direct: bool = False


def reduce_tensor(
    tensor: torch.Tensor, device_map: DeviceMap | None = None, notes: Notes | None = None
) -> Any:
    """Return the pickle reduction of a `torch.Tensor` (exactly) or `torch.nn.Parameter`.

    Attributes that the user gave it travel, too.

    Raises:
        SerializationError: the tensor is not on the CPU and there is no map for its device, or its
            storage was freed.
    """
    is_parameter = type(tensor) is torch.nn.Parameter
    if tensor.__dict__:
        # The detached tensor has no attributes.
        leaf = (tensor.detach(), tensor.requires_grad, is_parameter)
        return rebuild_leaf, leaf, tensor.__dict__, None, None, set_attributes
    if (
        not is_parameter
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_nested)
    ):
        return _reduce_dense(tensor, notes)
    if is_parameter or tensor.requires_grad:
        return rebuild_leaf, (tensor.detach(), tensor.requires_grad, is_parameter)
    if tensor.layout is torch.sparse_coo:
        found = (internals.indices(tensor)(), internals.values(tensor)())
        parts = (*found, tuple(tensor.shape), tensor.is_coalesced())
        return rebuild_coo, parts
    if tensor.layout in _COMPRESSED_LAYOUTS:
        return _reduce_compressed(tensor)
    if tensor.is_cpu or tensor.is_meta:
        reduced: Reduced = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return reduced
    return _reduce_device(tensor, device_map)


def _reduce_dense(tensor: torch.Tensor, notes: Notes | None) -> Reduced:
    requires_grad = tensor.requires_grad
    if notes is not None and notes.plan and (place := notes.place_of(tensor)) is not None:
        name, shape, at = _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), place.offset
        bits = tensor.is_conj(), tensor.is_neg()
        return rebuild_view, (place.block, name, shape, place.stride, at, requires_grad, *bits)
    sent = tensor
    if tensor.is_conj() or tensor.is_neg():
        sent = tensor.detach().resolve_conj().resolve_neg()
    data: bytearray | pickle.PickleBuffer = bytearray()
    if tensor.nbytes:
        sent, length = _with_few_holes(sent)
        if sent is tensor:
            data = _bytes_of(tensor, length, notes)
        else:
            data = _bytes_of(sent, length)
            if notes is not None:
                notes.note(tensor, tensor.untyped_storage().data_ptr())
            tensor = sent
    stride = tensor.stride()
    name = _DTYPE_NAMES[tensor.dtype]
    if requires_grad:
        return rebuild_tensor, (data, name, tuple(tensor.shape), stride, True)
    if stride == (1,):
        return rebuild_tensor, (data, name)
    return rebuild_tensor, (data, name, tuple(tensor.shape), stride)


def _with_few_holes(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor that is not empty, or a copy without holes, and the bytes that it covers."""
    length = tensor.nbytes
    if tensor.is_contiguous():
        return tensor, length
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    with_holes = (1 + last) * tensor.itemsize
    if with_holes <= max(2 * length, HOLES_ALLOWED_BYTES):
        return tensor, with_holes
    return tensor.detach().clone(memory_format=torch.preserve_format), length


def _bytes_of(
    tensor: torch.Tensor, length: int, notes: Notes | None = None
) -> bytearray | pickle.PickleBuffer:
    """Return the memory of a tensor, from its first element on. Notes the tensor."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    address = tensor.data_ptr()
    if notes is not None:
        notes.memory.append(tensor)  # as `note` does; a call of it costs a tenth of a microsecond
        notes.begins.add(begin)
    # FSDP and others free a tensor's memory behind its back; reading on would be a segfault.
    if storage.nbytes() < address - begin + length:
        raise SerializationError(
            f"can't send a tensor of shape {tuple(tensor.shape)}: its storage was resized to "
            f"{storage.nbytes()} bytes"
        )
    if length < INLINE_BYTES:
        return bytearray(string_at(address, length))
    return pickle.PickleBuffer(export(address, length, storage))


def _reduce_compressed(tensor: torch.Tensor) -> Reduced:
    if tensor.layout in _BY_ROWS:
        compressed, plain = tensor.crow_indices(), tensor.col_indices()
    else:
        compressed, plain = tensor.ccol_indices(), tensor.row_indices()
    name = _COMPRESSED_LAYOUTS[tensor.layout]
    return rebuild_compressed, (name, compressed, plain, tensor.values(), tuple(tensor.shape))


def _reduce_device(tensor: torch.Tensor, device_map: DeviceMap | None) -> Reduced:
    if device_map is None:
        raise SerializationError(
            f"can't send a tensor on {tensor.device}: farcall sends CPU tensors by default; move "
            f"the tensor to the CPU, or map its device with set_device_map in the options"
        )
    target = str(device_map.target(tensor.device))
    if device_map.is_direct and tensor.nbytes and not (tensor.is_quantized or tensor.is_nested):
        return _reduce_direct(tensor, target)
    return rebuild_on_device, (tensor.cpu(), target)


def _reduce_direct(tensor: torch.Tensor, target: str) -> Reduced:
    tensor, length = _with_few_holes(tensor.detach().resolve_conj().resolve_neg())
    flat = tensor.as_strided((length // tensor.itemsize,), (1,)).view(torch.uint8)
    # The transport's threads know nothing of the stream that computes it.
    ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
    buffer = pickle.PickleBuffer(OnDevice(flat, length, ready))
    name = _DTYPE_NAMES[tensor.dtype]
    return rebuild_direct, (buffer, name, tuple(tensor.shape), tensor.stride(), target)


def reduce_subclass(tensor: torch.Tensor) -> Any:
    """Return the reduction of a tensor of a subclass. `is_recorded`: whether it is torch's own."""
    # By torch's own a parameter of a subclass arrives as a Parameter.
    is_ours = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
    if not (is_ours and is_recorded(tensor)):
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    with internals.DisableTorchFunctionSubclass():
        data = tensor.detach().as_subclass(torch.Tensor)
    state = internals.get_obj_state(tensor)
    parts = (data, type(tensor), tensor.requires_grad)
    return rebuild_subclass, parts, state, None, None, set_state


def is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether gradients flow through a tensor of this kind, sent in an autograd context."""
    kind = type(tensor)
    if tensor.is_nested:
        return False
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    return (
        kind.__reduce_ex__ in _OWN_REDUCTIONS
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
    )


def described(tensor: torch.Tensor) -> str:
    """Name the kind of a tensor, for errors."""
    if type(tensor) is HiddenTensors:
        return f"a tensor that a module of type {tensor.inside} pickles in a way of its own"
    nested = "nested " if tensor.is_nested else ""
    return f"a {nested}tensor of type {type(tensor).__module__}.{type(tensor).__qualname__}"


def reduce_span(storage: torch.UntypedStorage, begin: int, end: int) -> Reduced:
    """Return the reduction of a storage of its own, over these bytes of another one."""
    part = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (end - begin,), (1,))
    return rebuild_storage, (_bytes_of(part, end - begin),)


def reduce_untyped_storage(storage: torch.UntypedStorage, notes: Notes | None = None) -> Any:
    """Return the reduction of a storage, as tensor subclasses and quantized tensors have one."""
    if storage.device.type != "cpu":
        raise SerializationError(
            f"can't send a storage on {storage.device}: farcall sends CPU storages only"
        )
    if not storage.nbytes():
        return rebuild_storage, (bytearray(),)
    place = None if notes is None else notes.place_of(storage)
    if place is not None:
        return itself, (place.block,)
    if notes is not None:
        notes.note(storage, storage.data_ptr())
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    return rebuild_storage, (_bytes_of(data, data.numel()),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Any:
    """Return the reduction of a typed storage: its bytes, and its dtype."""
    return rebuild_typed_storage, (internals.untyped_storage(storage), _DTYPE_NAMES[storage.dtype])


def reduce_memory_format(value: torch.memory_format) -> Reduced:
    """Return the reduction of a memory format.

    By torch's own it is an attribute "torch.channels_last" of the first module that happens to
    have imported torch, which may be one that the peer does not have.
    """
    return rebuild_memory_format, (str(value).removeprefix("torch."),)


# Rebuilding -------------------------------------------------------------------------------------


def _writable(buffer: Any) -> Any:
    """Return the buffer itself, or a copy when torch may not write to it."""
    view = memoryview(buffer)
    return bytearray(view) if view.readonly else view


def rebuild_tensor(
    buffer: Any,
    dtype_name: str,
    shape: tuple[int, ...] | None = None,
    stride: tuple[int, ...] = (1,),
    requires_grad: bool = False,
) -> torch.Tensor:
    """Return a tensor over `buffer`, without a copy if it is writable. No shape: one dimension."""
    dtype = _DTYPES[dtype_name]
    if len(buffer):
        data = buffer if type(buffer) is bytearray else _writable(buffer)
        tensor = torch.frombuffer(data, dtype=dtype)
        if shape is not None:
            # In place: an ordinary view would show up in autograd as a view of a hidden base.
            # torch checks that shape and stride stay inside the buffer.
            tensor.as_strided_(shape, stride)
    else:
        if shape is not None and 0 not in shape:
            raise ValueError(f"no bytes for a tensor of shape {shape}")
        tensor = torch.empty_strided(shape or (0,), stride, dtype=dtype)
    return attached(tensor) if requires_grad else tensor


def rebuild_view(
    storage: torch.UntypedStorage,
    dtype_name: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
    is_conj: bool,
    is_neg: bool,
) -> torch.Tensor:
    """Return a tensor over a storage that others of the message share, from this byte on.

    Raises:
        ValueError: the tensor would reach beyond the storage.
    """
    dtype = _DTYPES[dtype_name]
    numbers = (*shape, *stride, offset)
    if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
        raise ValueError("a tensor's memory is no storage of the CPU")
    if any(type(number) is not int or number < 0 for number in numbers) or offset % dtype.itemsize:
        raise ValueError(f"no shape, stride and offset of a tensor: {shape}, {stride}, {offset}")
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    # torch would try to make the storage larger.
    if 0 in shape or offset + (last + 1) * dtype.itemsize > storage.nbytes():
        raise ValueError(
            f"a tensor of shape {shape}, stride {stride} at byte {offset} does not lie in "
            f"{storage.nbytes()} bytes"
        )
    # No view of a hidden base, see `rebuild_tensor`.
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, offset // dtype.itemsize, shape, stride)
    if is_conj:
        internals.set_conj(tensor, True)
    if is_neg:
        internals.set_neg(tensor, True)
    return attached(tensor) if requires_grad else tensor


def itself(value: Any) -> Any:
    """Return an object made before: a storage that tensors of the message share."""
    return value


def rebuild_leaf(data: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a parameter, a tensor with attributes, or a leaf: `rebuild_tensor` makes none."""
    if not requires_grad:
        return torch.nn.Parameter(data, requires_grad=False) if is_parameter else data
    return attached(data, torch.nn.Parameter) if is_parameter else attached(data)


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Give a tensor that was made the attributes that the user gave the one that was sent."""
    tensor.__dict__.update(attributes)


def set_state(tensor: torch.Tensor, state: Any) -> None:
    """Give a tensor of a subclass its state, as torch does."""
    internals.rebuild_from_type_v2(itself, type(tensor), (tensor,), state)


def rebuild_subclass(
    data: torch.Tensor, kind: type[torch.Tensor], requires_grad: bool
) -> torch.Tensor:
    """Return a tensor of a subclass that adds nothing to torch's own way of pickling."""

    def leaf(data: torch.Tensor) -> torch.Tensor:
        return data.as_subclass(kind).requires_grad_()

    made = attached(data, leaf) if requires_grad else data
    return made if type(made) is kind else made.as_subclass(kind)


def rebuild_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool
) -> torch.Tensor:
    """Return a sparse COO tensor; its indices are checked."""
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=True, is_coalesced=is_coalesced
    )


def rebuild_compressed(
    layout_name: str,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Return a sparse CSR, CSC, BSR or BSC tensor; its indices are checked."""
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        shape,
        layout=_LAYOUTS_BY_NAME[layout_name],
        check_invariants=True,
    )


def rebuild_on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return the tensor on a device of this worker, as the sender's device map says."""
    return tensor.to(device)


def rebuild_direct(
    buffer: Any, dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...], device: str
) -> torch.Tensor:
    """Return a tensor over a buffer that came on a device; copied if that is not `device`."""
    flat = buffer.memory if isinstance(buffer, OnDevice) else None
    if not isinstance(flat, torch.Tensor):
        raise ValueError("a tensor's buffer was to be on a device, but came in the CPU's memory")
    if flat.is_cuda:
        # It was received on a stream of the transport's, which may have its memory again.
        flat.record_stream(torch.cuda.current_stream(flat.device))
    dtype = _DTYPES[dtype_name]
    # Neither is a view, see `rebuild_tensor`; and torch checks shape and stride.
    tensor = torch.empty(0, dtype=dtype, device=flat.device)
    tensor.set_(flat.untyped_storage(), 0, (flat.nbytes // dtype.itemsize,), (1,))
    return tensor.as_strided_(shape, stride).to(device)


def rebuild_memory_format(name: str) -> torch.memory_format:
    """Return the memory format of this name."""
    return _MEMORY_FORMATS[name]


def rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    """Return a storage over `buffer`."""
    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(_writable(buffer), dtype=torch.uint8).untyped_storage()


def rebuild_typed_storage(storage: torch.UntypedStorage, dtype_name: str) -> torch.TypedStorage:
    """Return a typed view of a storage."""
    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=_DTYPES[dtype_name], _internal=True
    )
