"""Be `torch.distributed.rpc`, for programs and libraries that can't be changed.

    import farcall.compat

    farcall.compat.install()

    import torch.distributed.rpc as rpc  # farcall's

`install` lets farcall's modules stand where torch's are imported from; `farcall run --compat
script.py` does it before the script begins, and in every process that it starts. Nothing else of
farcall changes anything in torch.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed.nn.api.remote_module
import torch.distributed.optim.optimizer
import torch.nn.parallel.distributed

from farcall.compat import autograd, nn, optim, rpc
from farcall.compat.rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    likeness,
    options,
    scripted_attributes,
    scripted_graphs,
    scripts,
    testing,
)
from farcall.compat.rpc.starting import start_agent
from farcall.compat.swap import Swap
from farcall.optim import DistributedOptimizer
from farcall.rref import RRef

__all__ = ["install", "is_installed", "start_agent", "uninstall"]

_MODULES = {
    "torch.distributed.rpc": rpc,
    "torch.distributed.rpc.api": api,
    "torch.distributed.rpc.functions": functions,
    "torch.distributed.rpc.internal": internal,
    "torch.distributed.rpc.options": options,
    "torch.distributed.rpc.constants": constants,
    "torch.distributed.rpc.backend_registry": backend_registry,
    "torch.distributed.rpc._testing": testing,
    "torch.distributed.autograd": autograd,
    "torch.distributed.optim": optim,
    "torch.distributed.nn": nn,
}
_swap = Swap()
_installed = False


def is_installed() -> bool:
    """Whether farcall stands in for torch.distributed.rpc in this process."""
    return _installed


def install() -> None:
    """Let `torch.distributed.rpc` and what belongs to it be farcall, in this process.

    What was imported from torch before keeps what it has, but for torch's own modules. Does nothing
    the second time. Not thread-safe.

    Raises:
        RuntimeError: torch's own RPC runs.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    if torch._C._distributed_rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch.distributed.rpc is initialized: call farcall.compat.install before its init_rpc"
        )
    scripted_attributes.install(_swap)
    scripted_graphs.install(_swap)
    for name, module in _MODULES.items():
        _swap.module(name, module)
    nn.install_remote_module(_swap)
    likeness.install(_swap)
    scripts.install(_swap)
    c_names = torch._C._distributed_rpc
    optimizer = sys.modules["torch.distributed.optim.optimizer"]
    for owner, name, value in (
        (torch._jit_internal, "RRef", RRef),
        (torch._jit_internal, "PyRRef", RRef),
        (torch.nn.parallel.distributed, "RRef", RRef),
        (c_names, "PyRRef", RRef),
        (c_names, "_is_current_rpc_agent_set", api._is_current_rpc_agent_set),
        (optimizer, "DistributedOptimizer", DistributedOptimizer),
        (optimizer, "rpc", rpc),
        (optimizer, "RRef", RRef),
        (RRef, "_get_type", api.get_type),
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
    _swap.undo()
    _installed = False
