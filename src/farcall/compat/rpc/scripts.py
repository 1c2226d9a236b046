"""TorchScript, where torch.distributed.rpc cares for it and farcall by itself does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from farcall.rref import RRef

# What torch's C++ code says of scripted functions that make calls, or take references.
_COMPLAINTS = ("RPC agent is not set", "Expected a value of type 'RRef")


def _explaining(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a scripted function, saying what the matter is if that makes calls itself."""

    def explaining_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except RuntimeError as error:
            if not any(complaint in str(error) for complaint in _COMPLAINTS):
                raise
            raise NotImplementedError(
                f"the scripted function {self.name} makes remote calls or uses RRefs itself, "
                "which TorchScript does through an agent in C++, and farcall has none: make the "
                "call in Python, around the scripted function; see docs/migrate.md, TorchScript"
            ) from error

    return explaining_call


def check_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RuntimeError if a scripted function takes less arguments than these."""
    most, count = len(function.schema.arguments), len(args) + len(kwargs)
    if count > most:
        raise RuntimeError(
            f"{function.name}() expected at most {most} argument(s) but received {count} "
            f"argument(s). Declaration: {function.schema}"
        )


def make(self: RRef[Any], value: Any, type_hint: Any = None) -> None:
    """`RRef(value)`; a script module needs its interface, which TorchScript would go by."""
    if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
        raise RuntimeError(
            "The RRef being created contains a ScriptModule, must provide its ModuleInterface type "
            "hint."
        )
    original_make(self, value, type_hint)


original_make = RRef.__init__


def install(swap: Any) -> None:
    """Change the classes of scripted functions and of references."""
    for scripted in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        swap.attribute(scripted, "__call__", _explaining(scripted.__call__))
    swap.attribute(RRef, "__init__", make)
