"""The picklers: what farcall adds to pickle on the way out.

One pickler is made per message and holds what belongs to that message alone: the out-of-band
buffers, the tensors that require grad, the reducers and the device map of the caller. The fast one
is C pickle with a hook; the other is cloudpickle with the same hook, for what has no name.
Pickling runs user code (`__reduce__`, `__getstate__`), so nothing here holds a lock.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from cloudpickle import cloudpickle as cloudpickle_internals

from farcall.serde.exceptions import has_own_reduction, reduce_exception
from farcall.serde.functions import MAIN, SPAWNED_MAIN, name_of, resolve
from farcall.serde.tensors import (
    INLINE_BYTES,
    DeviceMap,
    reduce_memory_format,
    reduce_tensor,
    reduce_typed_storage,
    reduce_untyped_storage,
)

Externals = Mapping[type, Callable[[Any], tuple[Any, ...]]]

if TYPE_CHECKING:
    # cloudpickle has no types; to mypy both picklers are this one.
    _CloudPickler = pickle.Pickler
else:
    _CloudPickler = cloudpickle.Pickler

_NO_EXTERNALS: Externals = types.MappingProxyType({})
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    torch.memory_format: reduce_memory_format,
    torch.UntypedStorage: reduce_untyped_storage,
    torch.TypedStorage: reduce_typed_storage,
}
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
# Types whose subclasses are treated alike, so a table of exact types can't hold them.
_SCRIPTED = (torch.jit.ScriptModule, torch._C.ScriptFunction)
_FAMILIES = (BaseException, *_SCRIPTED)
_MAINS = (MAIN, SPAWNED_MAIN)


class Buffers(list[memoryview]):
    """The out-of-band buffers of one message, as flat bytes."""

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickle's buffer_callback: true leaves the buffer in the pickle."""
        view = buffer.raw()
        if view.nbytes < INLINE_BYTES:
            return True
        self.append(view)
        return False


class FastPickler(pickle.Pickler):
    """C pickle, protocol 5; tensors, exceptions, scripted code and externals our way."""

    # Defaults on the class: a message that needs none of them doesn't pay for setting them.
    externals: Externals = _NO_EXTERNALS
    device_map: DeviceMap | None = None
    tensors: list[torch.Tensor] | None = None

    def reducer_override(self, value: Any) -> Any:
        # As `_reduce`; each call counts here.
        kind = type(value)
        if kind in _TENSORS:
            return _reduce_tensor(self, value)
        if kind in self.externals or kind in _REDUCERS or issubclass(kind, _FAMILIES):
            return _reduce(self, value)
        return NotImplemented


class ByValuePickler(_CloudPickler):
    """cloudpickle with the same reductions: what has no name goes as code.

    With `main_by_value`, so does everything defined in `__main__`; else that goes by name, because
    a class that went by value would be another class on arrival.
    """

    externals: Externals = _NO_EXTERNALS
    device_map: DeviceMap | None = None
    tensors: list[torch.Tensor] | None = None
    main_by_value: bool = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType):
            if value.__module__ in _MAINS:
                return self._reduce_main(value)
            name = name_of(value)
            # Found under another name than pickle would look for, as F.max_pool2d is.
            if name is not None and name.partition(":")[2] != value.__qualname__:
                return resolve, (name,)
            return super().reducer_override(value)
        reduced = _reduce(self, value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced

    def _reduce_main(self, value: type | types.FunctionType) -> Any:
        if not self.main_by_value and name_of(value) is not None:
            return NotImplemented
        if value.__module__ == SPAWNED_MAIN:
            # cloudpickle knows __main__ only, and would name this one. Telling it otherwise in
            # public (register_pickle_by_value) would change it for the whole process.
            if isinstance(value, type):
                return cloudpickle_internals._dynamic_class_reduce(value)
            return self._dynamic_function_reduce(value)  # type: ignore[attr-defined]
        return super().reducer_override(value)


def _reduce(pickler: FastPickler | ByValuePickler, value: Any) -> Any:
    kind = type(value)
    if kind in pickler.externals:
        return pickler.externals[kind](value)
    if kind in _TENSORS:
        return _reduce_tensor(pickler, value)
    if issubclass(kind, _FAMILIES):
        return _reduce_family(value)
    if kind in _REDUCERS:
        return _REDUCERS[kind](value)
    return NotImplemented


def _reduce_tensor(pickler: FastPickler | ByValuePickler, value: Any) -> Any:
    if value.requires_grad:
        if pickler.tensors is None:
            pickler.tensors = []
        pickler.tensors.append(value)
    return reduce_tensor(value, pickler.device_map)


def _reduce_family(value: Any) -> Any:
    if isinstance(value, BaseException):
        return NotImplemented if has_own_reduction(type(value)) else reduce_exception(value)
    if isinstance(value, torch._C.ScriptFunction):
        name = name_of(value)
        if name is not None:
            return resolve, (name,)
    stream = io.BytesIO()
    torch.jit.save(value, stream)
    return rebuild_script, (pickle.PickleBuffer(stream.getvalue()),)


def rebuild_script(saved: Any) -> Any:
    """A script module from what `torch.jit.save` wrote."""
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
