"""The picklers: what farcall adds to pickle on the way out.

A pickler works on one message at a time, and notes three things in it: out-of-band buffers, tensors
that require grad, references. The fast one is C pickle with a table of reducers; the other is
cloudpickle with a hook, for what has no name. Pickling runs user code (`__reduce__`,
`__getstate__`), so nothing here holds a lock.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
import torch
from cloudpickle import cloudpickle as cloudpickle_internals

from farcall.serde.exceptions import has_own_reduction, reduce_by_own_word, reduce_exception
from farcall.serde.functions import MAIN, SPAWNED_MAIN, name_of, resolve
from farcall.serde.loading import load_reference
from farcall.serde.notes import Notes
from farcall.serde.scripts import SCRIPTED, hidden_tensors, own_parameters, reduce_script
from farcall.serde.sharing import plan_of
from farcall.serde.tensors import (
    INLINE_BYTES,
    DeviceMap,
    reduce_memory_format,
    reduce_span,
    reduce_subclass,
    reduce_tensor,
    reduce_typed_storage,
    reduce_untyped_storage,
)
from farcall.torch_internals import ScriptFunction
from farcall.wire.messages import OnDevice

PROTOCOL = 5

# Called with each reference that is met; raises if it can't be sent.
Check = Callable[[Any], None]
Reducer = Callable[[Any], Any]

if TYPE_CHECKING:
    # cloudpickle has no types; to mypy both picklers are this one.
    _CloudPickler = pickle.Pickler
else:
    _CloudPickler = cloudpickle.Pickler

_REDUCERS: dict[type, Reducer] = {
    torch.memory_format: reduce_memory_format,
    torch.TypedStorage: reduce_typed_storage,
}
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_MAINS = (MAIN, SPAWNED_MAIN)


# A pickler that made a larger pickle is not used again: it keeps memory in proportion.
REUSED_BYTES = 64 << 10


class Payload(msgspec.Struct):
    """A pickled object.

    Attributes:
        body: the pickle.
        buffers: its out-of-band buffers, flat bytes, not copied: they show later changes. Some may
            be `OnDevice`, if the device map is direct.
        tensors: the tensors in it that require grad, in the order in which `load` attaches them.
            A `HiddenTensors` among them stands for some that `load` can't attach.
        references: the references in it; `load` is to be given what stands for them.
    """

    body: bytes
    buffers: Sequence[memoryview | OnDevice] = ()
    tensors: Sequence[torch.Tensor] = ()
    references: Sequence[Any] = ()


class OutOfBand:
    """Objects that are met in one message and don't go into its pickle, or not only."""

    __slots__ = ("buffers", "check", "device_map", "modules", "notes", "references", "tensors")

    def __init__(self, check: Check | None) -> None:
        self.check = check
        self.device_map: DeviceMap | None = None
        self.buffers: list[memoryview | OnDevice] = []
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []
        self.modules: list[torch.nn.Module] = []  # with reductions of their own
        self.notes = Notes()

    def collect(self, dump: Callable[[Any], bytes], value: Any) -> Payload:
        """Pickle one message; twice, if tensors in it turn out to have memory in common.

        Args:
            dump: pickles it.
            value: the message.
        """
        notes = self.notes
        try:
            body = dump(value)
            if len(notes.begins) < len(notes.memory):  # a storage was met twice
                plan = plan_of(notes.memory, reduce_span)
                if plan:
                    self.buffers, self.tensors, self.references = [], [], []
                    self.modules = []
                    notes.plan = plan
                    body = dump(value)
            if self.modules:
                self._note_hidden()
        finally:
            if self.modules:
                self.modules = []
            if notes.memory:
                notes.clear()
        return self.payload(body)

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickle's buffer_callback: true leaves the buffer in the pickle."""
        view = buffer.raw()
        if isinstance(view.obj, OnDevice):
            self.buffers.append(view.obj)
            return False
        if view.nbytes < INLINE_BYTES:
            return True
        self.buffers.append(view)
        return False

    def reduce_tensor(self, value: Any) -> Any:
        if value.requires_grad:
            self.tensors.append(value)
        return reduce_tensor(value, self.device_map, self.notes)

    def reduce_subclass(self, value: Any) -> Any:
        if value.requires_grad:
            self.tensors.append(value)
        return reduce_subclass(value)

    def reduce_storage(self, value: Any) -> Any:
        return reduce_untyped_storage(value, self.notes)

    def reduce_module(self, value: Any) -> Any:
        """Reduce a module by its own word, which need not mention its parameters."""
        self.modules.append(value)
        return _reduce_plainly(value)

    def _note_hidden(self) -> None:
        """Note the parameters of modules that their own reductions have left out."""
        met = set(map(id, self.tensors))
        for module in self.modules:
            if any(one.requires_grad and id(one) not in met for one in own_parameters(module)):
                self.tensors.append(hidden_tensors(module))

    def reduce_script(self, value: Any) -> Any:
        if isinstance(value, ScriptFunction):
            name = name_of(value)
            if name is not None:
                return resolve, (name,)
        reduced, tensors = reduce_script(value)
        self.tensors += tensors
        return reduced

    def reduce_reference(self, value: Any) -> Any:
        if self.check is not None:
            self.check(value)
        self.references.append(value)
        return load_reference, (len(self.references) - 1,)

    def payload(self, body: bytes) -> Payload:
        """Return the result. It has the notes of the message from now on, and this has none."""
        if not (self.buffers or self.tensors or self.references):
            return Payload(body)
        payload = Payload(body, self.buffers, self.tensors, self.references)
        self.buffers, self.tensors, self.references = [], [], []
        return payload


class FastPickler(OutOfBand):
    """C pickle, protocol 5; tensors, references, exceptions and scripted code our way.

    It can be used for one message after the other: making one takes as long as five small pickles.
    """

    __slots__ = ("_parts", "_pickler", "write")

    def __init__(
        self,
        reference: type | None,
        check: Check | None,
        more: Mapping[type, Reducer],
    ) -> None:
        super().__init__(check)
        self._parts: list[bytes] = []
        self.write = self._parts.append  # this is the file that C pickle writes to
        self._pickler = pickle.Pickler(self, PROTOCOL, buffer_callback=self.take_buffer)
        # Not `reducer_override`: that is called for functions and classes, too.
        self._pickler.dispatch_table = _Reducers(self, reference, more)

    def dump(self, value: Any, device_map: DeviceMap | None) -> Payload:
        """Pickle one message."""
        self.device_map = device_map
        try:
            return self.collect(self._dump, value)
        except BaseException:
            self.payload(b"")  # the notes are not kept either
            raise

    def _dump(self, value: Any) -> bytes:
        parts = self._parts
        try:
            self._pickler.dump(value)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            # C pickle lets go of its memo one by one, and leaves dead objects in the table until it
            # is through. An object that ends there may start the collector, which looks at that
            # table. So none may end there: this holds them all for so long.
            held = self._pickler.memo.copy()
            self._pickler.clear_memo()
            del held
            parts.clear()


class _Reducers(dict[type, Reducer]):
    """The table in which C pickle looks up the reducer of a type that it does not know itself."""

    def __init__(
        self, out_of_band: OutOfBand, reference: type | None, more: Mapping[type, Reducer]
    ) -> None:
        super().__init__(_REDUCERS)
        self._more = more
        self._out_of_band = out_of_band
        for kind in _TENSORS:
            self[kind] = out_of_band.reduce_tensor
        self[torch.UntypedStorage] = out_of_band.reduce_storage
        if reference is not None:
            self[reference] = out_of_band.reduce_reference

    def __missing__(self, kind: type) -> Reducer:
        # Not remembered: the table would keep the types of users alive.
        reducer = (
            self._more.get(kind)
            or _family_reducer(kind, self._out_of_band)
            or copyreg.dispatch_table.get(kind)
        )
        if reducer is not None:
            return reducer
        if issubclass(kind, torch.Tensor):
            return self._out_of_band.reduce_subclass
        if issubclass(kind, type):
            raise KeyError(kind)  # a class that has a metaclass; it goes by name
        return _reduce_plainly


class ByValuePickler(_CloudPickler):
    """cloudpickle with the same reductions: what has no name goes as code.

    With `main_by_value`, so does everything defined in `__main__`; else that goes by name, because
    a class that went by value would be another class on arrival.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        out_of_band: OutOfBand,
        reference: type | None,
        main_by_value: bool,
        more: Mapping[type, Reducer],
    ) -> None:
        super().__init__(stream, PROTOCOL, buffer_callback=out_of_band.take_buffer)
        self._out_of_band = out_of_band
        self._reference = reference
        self._main_by_value = main_by_value
        self._more = more

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType):
            if value.__module__ in _MAINS:
                return self._reduce_main(value)
            name = name_of(value)
            # Found under another name than pickle would look for, as F.max_pool2d is.
            if name is not None and name.partition(":")[2] != value.__qualname__:
                return resolve, (name,)
            return super().reducer_override(value)
        kind = type(value)
        if kind is self._reference:
            return self._out_of_band.reduce_reference(value)
        if kind in _TENSORS:
            return self._out_of_band.reduce_tensor(value)
        if kind is torch.UntypedStorage:
            return self._out_of_band.reduce_storage(value)
        if kind in _REDUCERS:
            return _REDUCERS[kind](value)
        reducer = self._more.get(kind) or _family_reducer(kind, self._out_of_band)
        if reducer is None and isinstance(value, torch.Tensor):
            reducer = copyreg.dispatch_table.get(kind) or self._out_of_band.reduce_subclass
        return super().reducer_override(value) if reducer is None else reducer(value)

    def _reduce_main(self, value: type | types.FunctionType) -> Any:
        if not self._main_by_value and name_of(value) is not None:
            return NotImplemented
        if value.__module__ == SPAWNED_MAIN:
            # cloudpickle knows __main__ only, and would name this one. Telling it otherwise in
            # public (register_pickle_by_value) would change it for the whole process.
            if isinstance(value, type):
                return cloudpickle_internals._dynamic_class_reduce(value)
            return self._dynamic_function_reduce(value)  # type: ignore[attr-defined]
        return super().reducer_override(value)


_REDUCTIONS = ("__reduce_ex__", "__reduce__", "__getstate__")
# The default, for a type that has no reducer of its own.
_reduce_plainly = methodcaller("__reduce_ex__", PROTOCOL)


def _family_reducer(kind: type, out_of_band: OutOfBand) -> Reducer | None:
    if issubclass(kind, BaseException):
        if kind in copyreg.dispatch_table:
            return None
        return reduce_by_own_word if has_own_reduction(kind) else reduce_exception
    if issubclass(kind, SCRIPTED):
        return out_of_band.reduce_script
    if issubclass(kind, torch.nn.Module) and kind not in copyreg.dispatch_table:
        return None if _reduces_as_usual(kind) else out_of_band.reduce_module
    return None


def _reduces_as_usual(kind: Any) -> bool:
    return all(getattr(kind, name) is getattr(object, name) for name in _REDUCTIONS)
