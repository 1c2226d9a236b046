"""Every name that torch's modules have is found in the modules that stand for them.

Programs lean on private names, too. Plain Python of torch is made to run over farcall,
constants are taken as they are, and what belongs to torch's agent in C++ raises an error, when it
is called, that says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from farcall import torch_internals as internals

# In C++, and of use without an agent there. So are all constants.
_KEPT = {
    "RemoteProfilerManager",
    internals.attribute_of("disable_jit_rref_pickle"),
    internals.attribute_of("enable_jit_rref_pickle"),
    internals.attribute_of("set_profiler_node_id"),
}
# In Python, but made for torch's agent in C++.
_OF_AGENT = {
    internals.attribute_of("set_devices_and_reverse_device_map"),
    internals.attribute_of("update_group_membership"),
}


def refused(name: str) -> Callable[..., NoReturn]:
    """Return a stand-in for a function of torch's which farcall has not."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} belongs to torch's own agent in C++, which farcall has not; "
            "see docs/migrate.md, programs that can't be changed"
        )

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def complete(modules: Mapping[str, ModuleType]) -> None:
    """Give farcall's modules the names that they lack.

    Args:
        modules: farcall's, by the names of torch's for which they are to stand, before they do.
    """
    of_c = {
        id(value): (f"{theirs.__name__}.{name}", ours.get(name))
        for theirs, ours in c_modules(modules)
        for name, value in vars(theirs).items()
    }
    for name, module in modules.items():
        theirs = sys.modules.get(name)
        for key, value in list(vars(theirs).items()) if theirs else ():
            if key[:2] != "__" and not hasattr(module, key):
                setattr(module, key, _ours(key, value, name, module, modules, of_c))


def c_modules(
    modules: Mapping[str, ModuleType],
) -> list[tuple[ModuleType, dict[str, Any]]]:
    """Return torch's modules that are written in C++, with farcall's of the same names."""
    found = []
    for theirs, standing in (
        (internals.c_rpc, "torch.distributed.rpc"),
        (internals.c_autograd, "torch.distributed.autograd"),
    ):
        own = vars(modules[standing])
        names = {key for key in vars(theirs) if key[:2] != "__" and key not in _KEPT}
        found.append((theirs, {key: own[key] for key in names & own.keys()}))
    return found


def _ours(
    key: str,
    value: Any,
    name: str,
    module: ModuleType,
    modules: Mapping[str, ModuleType],
    of_c: Mapping[int, tuple[str, Any]],
) -> Any:
    if isinstance(value, ModuleType):
        return modules.get(value.__name__, value)
    if id(value) in of_c and callable(value) and key not in _KEPT:
        full_name, own = of_c[id(value)]
        return own or refused(full_name)
    if key in _OF_AGENT:
        return refused(f"{value.__module__}.{key}")
    if not isinstance(value, FunctionType):
        return value
    if value.__globals__ is vars(sys.modules[name]):
        return _rebound(value, module)
    own = getattr(modules.get(value.__module__), key, None)
    return value if own is None else own


def _rebound(function: FunctionType, module: ModuleType) -> FunctionType:
    """Return a function of torch's that takes from a module of farcall's, not from its own."""
    made = FunctionType(
        function.__code__,
        vars(module),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__ = module.__name__
    return made
