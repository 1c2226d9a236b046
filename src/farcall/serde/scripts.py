"""TorchScript modules and functions: what `torch.jit.save` writes, and the tensors in it.

The tensors of a module are in the saved bytes, where no pickler meets them. Those that require grad
go along by name, so that gradients flow through them as through the parameters of any module.
Stateless; safe from any thread.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from farcall import torch_internals as internals
from farcall.serde.loading import attached

_REBUILD = internals.attribute_of("rebuild_tensor_v2")
SCRIPTED = (torch.jit.ScriptModule, internals.ScriptFunction)


class HiddenTensors(torch.Tensor):
    """Stands for tensors of a module that require grad, and that no message can record.

    Attributes:
        inside: the name of the module's type.
    """

    inside: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no message has such a tensor")


def hidden_tensors(module: Any) -> HiddenTensors:
    """Return what stands for the tensors of this module that can't be recorded."""
    hidden = torch.empty(0).as_subclass(HiddenTensors)
    hidden.inside = getattr(module, "original_name", type(module).__name__)
    return hidden


def own_parameters(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Give the parameters that a module and its parts hold.

    `module.parameters()` may be a method of the user's, or of `RemoteModule`, which makes a call.
    """
    parts, seen = [module], set[int]()
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        held = object.__getattribute__(part, "__dict__")
        yield from (one for one in held.get(internals.parameters, {}).values() if one is not None)
        parts += [one for one in held.get(internals.modules, {}).values() if one is not None]


def reduce_script(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the reduction of a script module or function, and its tensors that require grad.

    The tensors are in the order in which `rebuild_script` attaches them. The last is a
    `HiddenTensors` if there are some that can't be attached.
    """
    stream = io.BytesIO()
    torch.jit.save(value, stream)
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(value, torch.jit.ScriptModule):
        tensors = _tensors_with_grad(value)
    met = list(tensors.values())
    if _count_with_grad(stream) > len(met):
        met.append(hidden_tensors(value))
    saved = pickle.PickleBuffer(stream.getvalue())
    return (rebuild_script, (saved, tuple(tensors))), met


def _tensors_with_grad(module: torch.jit.ScriptModule) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that require grad, by one name each."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in _named_tensors(module):
        if tensor.requires_grad:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _named_tensors(module: torch.jit.ScriptModule) -> Iterable[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _count_with_grad(stream: io.BytesIO) -> int:
    """Return the number of tensors requiring grad that `torch.jit.save` wrote, also nested ones.

    TorchScript does not tell which attributes a module has.
    """
    with zipfile.ZipFile(stream) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        counter = _Counter(io.BytesIO(archive.read(name)))
    counter.load()
    return counter.count


class _Counter(pickle.Unpickler):
    """Counts the tensors that require grad, and makes nothing of what it reads."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.count = 0

    def find_class(self, module: str, name: str) -> Any:
        return self._note_tensor if name == _REBUILD else _Anything

    def persistent_load(self, identity: Any) -> None:
        """Storages are not looked at."""

    def _note_tensor(
        self, storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, *more: Any
    ) -> None:
        self.count += requires_grad


class _Anything:
    def __new__(cls, *args: Any) -> _Anything:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def rebuild_script(saved: Any, names: tuple[str, ...] = ()) -> Any:
    """Load what `torch.jit.save` wrote, and attach the tensors of these names."""
    loaded = torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
    tensors = dict(_named_tensors(loaded)) if names else {}
    for name in names:
        # The module has this very tensor, which gets its history in place.
        attached(tensors[name].requires_grad_(False))
    return loaded
