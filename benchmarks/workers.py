"""A process that becomes a worker of an implementation, and ends with the one that started it."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
from typing import Any, NamedTuple

from plans import BEFORE, FARCALL, OURS, TORCH, World

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
# All imports are done in a process that forks, which saves most of the time of a start.
CONTEXT = multiprocessing.get_context("fork")

# By implementation, what `join` needs.
RPC_MODULES = {
    FARCALL: "farcall.rpc",
    TORCH: "torch.distributed.rpc",
    "ray": "over_ray",
    "rpyc": "over_rpyc",
    "grpc": "over_grpc",
}
RPC_MODULES[BEFORE] = RPC_MODULES[FARCALL]
# The modules for training, beside the one for calls: `Modules`.
TRAINING_MODULES = {
    FARCALL: ("farcall.autograd", "farcall.optim", "farcall.nn"),
    TORCH: (
        "torch.distributed.autograd",
        "torch.distributed.optim",
        "torch.distributed.nn",
    ),
}
TRAINING_MODULES[BEFORE] = TRAINING_MODULES[FARCALL]
TCP_ONLY: dict[str, dict[str, Any]] = {
    "encrypted": {"paths": ["tcp"]},
    "plain": {"paths": ["tcp"], "insecure": True},
}
TORCHS_TCP = {"_transports": ["uv"]}


def module_of(implementation: str) -> Any:
    return importlib.import_module(RPC_MODULES[implementation])


class Modules(NamedTuple):
    """Of an implementation, with the names of torch.distributed's."""

    rpc: Any
    autograd: Any
    optim: Any
    nn: Any


def modules_of(implementation: str) -> Modules:
    others = map(importlib.import_module, TRAINING_MODULES[implementation])
    return Modules(module_of(implementation), *others)


def end_with_parent() -> None:
    """Has Linux kill this process, which may be stopped then, when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)  # it ended before that


def join(implementation: str, store: str, world: World, rank: int) -> Any:
    """Return the implementation's module for calls, of which this process is a worker now.

    Or something with its names. Workers find each other through the file `store`. `shutdown` waits
    for the others.
    """
    module = module_of(implementation)
    if implementation not in (*OURS, TORCH):
        return module.join(store, world.size, rank)
    more: dict[str, Any] = {}
    if world.tcp:
        more = TORCHS_TCP if implementation == TORCH else TCP_ONLY[world.tcp]
    options = module.TensorPipeRpcBackendOptions(init_method=f"file://{store}", **more)
    name = f"{world.name}{rank}"
    module.init_rpc(name, rank=rank, world_size=world.size, rpc_backend_options=options)
    return module
