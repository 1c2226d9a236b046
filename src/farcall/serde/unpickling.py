"""The unpicklers: what a body may name, by policy.

Without a policy bodies go through C pickle itself, which can import and call anything; that is
what remote calls are, and the links are authenticated. `NamedUnpickler` refuses code that came by
value: it keeps honest peers to code that is deployed here, but pickle can be made to run anything
by who tries. `PlainUnpickler` is the real fence: it knows a short list of names and no others.
"""

from __future__ import annotations

import builtins
import collections
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall import errors
from farcall.errors import Refused
from farcall.ids import WorkerInfo
from farcall.serde import exceptions, loading, tensors
from farcall.serde.functions import MAIN, SPAWNED_MAIN

# The upper layer's function that makes a reference out of what `load_reference` returned.
REFERENCE = ("farcall.rref", "rebuild_reference")


class MainUnpickler(pickle.Unpickler):
    """For bodies that name `__mp_main__` on a worker that was not spawned: here it is __main__."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return super().find_class(_main(module_name), global_name)


def _main(module_name: str) -> str:
    return MAIN if module_name == SPAWNED_MAIN else module_name


class NamedUnpickler(MainUnpickler):
    """Refuses functions and classes that came by value."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.partition(".")[0] == "cloudpickle":
            raise Refused(
                "this worker does not run code that comes by value (lambdas, local functions, "
                "classes of __main__); define it in a module that it can import"
            )
        return super().find_class(module_name, global_name)


class _Sealed:
    """A function that pickle can call and not change.

    Pickle's BUILD sets attributes of whatever is on its stack; a plain function has `__defaults__`
    and `__code__` to set.
    """

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("sealed")

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _safe_names() -> dict[tuple[str, str], Any]:
    functions: list[Callable[..., Any]] = [
        loading.load_reference,
        tensors.rebuild_tensor,
        tensors.rebuild_view,
        tensors.rebuild_storage,
        tensors.rebuild_leaf,
        tensors.itself,
        tensors.rebuild_coo,
        tensors.rebuild_compressed,
        tensors.rebuild_on_device,
        tensors.rebuild_direct,
        tensors.rebuild_memory_format,
        # torch's reduction of a layout: looks the name up in a table.
        torch.serialization._get_layout,
    ]
    names = {(f.__module__, f.__qualname__): _Sealed(f) for f in functions}
    types: list[Any] = [complex, range, slice, collections.OrderedDict]
    types += [value for value in vars(builtins).values() if _is_exception(value)]
    safe: dict[tuple[str, str], Any] = {(t.__module__, t.__qualname__): t for t in types}
    # Classes written in Python can be changed as functions can; the built-in ones can't.
    python_types = [WorkerInfo, *filter(_is_exception, vars(errors).values())]
    safe |= {(t.__module__, t.__qualname__): _Sealed(t) for t in python_types}
    rebuild = exceptions.rebuild_exception
    safe[rebuild.__module__, rebuild.__qualname__] = _Sealed(_rebuild_exception)
    setter = tensors.set_attributes
    safe[setter.__module__, setter.__qualname__] = _Sealed(_set_attributes)
    safe |= {("torch", "Size"): torch.Size, ("torch", "device"): torch.device}
    constants = torch.dtype | torch.layout
    safe |= {("torch", k): v for k, v in vars(torch).items() if isinstance(v, constants)}
    return safe | names


def _rebuild_exception(cls: Any, args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    unsealed: Any = cls._function if isinstance(cls, _Sealed) else cls
    return exceptions.rebuild_exception(unsealed, args, state)


def _set_attributes(tensor: Any, attributes: Any) -> None:
    if not (isinstance(tensor, torch.Tensor) and type(attributes) is dict):
        raise TypeError("only tensors have attributes")
    for name in attributes:
        if not isinstance(name, str) or hasattr(torch.Tensor, name):
            raise Refused(f"this worker takes no tensors that have {name!r} in place of torch's")
    tensors.set_attributes(tensor, attributes)


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


_SAFE = _safe_names()


class PlainUnpickler(pickle.Unpickler):
    """Plain data, tensors and references only."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            if (module_name, global_name) == REFERENCE:
                return _Sealed(super().find_class(module_name, global_name))
            return _SAFE[module_name, global_name]
        except KeyError:
            raise Refused(
                f"this worker takes plain data and tensors only; "
                f"it refuses {module_name}.{global_name}"
            ) from None


def unpickle(
    kind: type[pickle.Unpickler], body: bytes | bytearray | memoryview, buffers: Sequence[Any]
) -> Any:
    """Load with one of these classes."""
    return kind(io.BytesIO(body), buffers=buffers).load()
