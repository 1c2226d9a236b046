"""Be `torch.distributed.rpc`, for programs and libraries that can't be changed.

    import farcall.compat

    farcall.compat.install()

    import torch.distributed.rpc as rpc  # farcall's

`install` lets farcall's modules stand where torch's are imported from; `farcall launch --compat
script.py` does it before the script begins, and in every process that it starts. Nothing else of
farcall changes anything in torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch
import torch.distributed.rpc
import torch.nn.parallel.distributed

from farcall import torch_internals as internals
from farcall.compat import autograd, names, nn, rpc
from farcall.compat.imports import ImportHook
from farcall.compat.rpc import (
    api,
    backend_registry,
    constants,
    debugging,
    functions,
    internal,
    options,
    quirks,
    scripted_attributes,
    scripted_graphs,
    scripts,
    starting,
)
from farcall.compat.rpc.starting import start_agent
from farcall.compat.swap import Swap
from farcall.rref import RRef
from farcall.runtime.calls.graph_breaks import module_breaks_graphs

__all__ = ["install", "is_installed", "start_agent", "uninstall"]

_MODULES = {
    "torch.distributed.rpc": rpc,
    "torch.distributed.rpc.api": api,
    "torch.distributed.rpc.functions": functions,
    "torch.distributed.rpc.internal": internal,
    "torch.distributed.rpc.options": options,
    "torch.distributed.rpc.constants": constants,
    "torch.distributed.rpc.backend_registry": backend_registry,
    "torch.distributed.autograd": autograd,
}
_THEIRS = {name: sys.modules[name] for name in _MODULES}
_SERVER_PROFILER = "torch.distributed.rpc.server_process_global_profiler"
_ENABLE_PROFILER = internals.attribute_of("enable_server_process_global_profiler")
_TESTING = internals.path_of("rpc_testing")
for _module in (api, autograd, backend_registry, debugging, quirks, scripts, starting):
    module_breaks_graphs(_module)
names.complete(_MODULES)
_swap = Swap()
_hook = ImportHook()
_installed = False


def __dir__() -> list[str]:
    return __all__


def is_installed() -> bool:
    """Return whether farcall stands in for torch.distributed.rpc in this process."""
    return _installed


def install() -> None:
    """Let `torch.distributed.rpc` and what belongs to it be farcall, in this process.

    Modules that imported names from torch before keep them, but for torch's own. Does nothing
    the second time. Not thread-safe.

    Raises:
        RuntimeError: torch's own RPC runs.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    if internals.is_current_rpc_agent_set():
        raise RuntimeError(
            "torch.distributed.rpc is initialized: call farcall.compat.install before its init_rpc"
        )
    scripted_attributes.install(_swap)
    scripted_graphs.install(_swap)
    for name, module in _MODULES.items():
        _swap.module(name, module)
    _hook.begin()
    nn.install(_swap, _hook)
    _hook.after("torch.distributed.optim", _replace_optimizer)
    _install_testing()
    quirks.install(_swap)
    scripts.install(_swap)
    for theirs, ours in names.c_modules(_MODULES):
        for name, value in ours.items():
            _swap.attribute(theirs, name, value)
    profiler = sys.modules[_SERVER_PROFILER]
    for owner, name, value in (
        (internals.jit_internal, "RRef", RRef),
        (internals.jit_internal, "PyRRef", RRef),
        (torch.nn.parallel.distributed, "RRef", RRef),
        (profiler, _ENABLE_PROFILER, getattr(rpc, _ENABLE_PROFILER)),
        (RRef, internals.attribute_of("get_type"), api.get_type),
        (options.TensorPipeRpcBackendOptions, "_only_options", False),  # as torch's
    ):
        _swap.attribute(owner, name, value)
    _installed = True


def uninstall() -> None:
    """Put everything back that `install` replaced. Not thread-safe.

    Raises:
        RuntimeError: farcall's RPC runs.
    """
    global _installed  # noqa: PLW0603
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is initialized: call shutdown before farcall.compat.uninstall")
    _hook.end()
    _swap.undo()
    _installed = False


def _replace_optimizer(package: ModuleType) -> None:
    """torch.distributed.optim was imported. Of its classes only this one needs RPC."""
    theirs = _THEIRS["torch.distributed.rpc"]
    optimizer = sys.modules["torch.distributed.optim.optimizer"]
    ours = importlib.import_module("farcall.optim").DistributedOptimizer
    gradients = _THEIRS["torch.distributed.autograd"]
    taken = {"rpc": theirs, "RRef": theirs.RRef, "dist_autograd": gradients}
    _swap.taken(optimizer, taken)
    for owner, name, value in (
        (optimizer, "rpc", rpc),
        (optimizer, "RRef", RRef),
        (optimizer, "dist_autograd", autograd),
        (optimizer, "DistributedOptimizer", ours),
        (package, "DistributedOptimizer", ours),
    ):
        _swap.attribute(owner, name, value)


def _testing() -> ModuleType:
    return importlib.import_module("farcall.compat.rpc.testing")


def _install_testing() -> None:
    """torch.distributed.rpc._testing, which adds a backend when it is imported."""
    places = (_TESTING, f"{_TESTING}.faulty_agent_backend_registry")
    if _TESTING in sys.modules:
        for place in places:
            _swap.module(place, _testing())
        return
    _swap.drop(_TESTING)
    for place in places:
        _hook.instead(place, _testing)
