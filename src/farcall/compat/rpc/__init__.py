"""What `torch.distributed.rpc` is while farcall stands in for it."""

from __future__ import annotations

import numbers
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farcall import rpc as farcall_rpc
from farcall.compat import autograd
from farcall.compat.rpc import api, backend_registry, constants, functions, internal, options
from farcall.compat.rpc.agents import RpcAgent, TensorPipeAgent
from farcall.compat.rpc.api import (
    AllGatherStates,
    RRef,
    _all_gather,
    _barrier,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _require_initialized,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farcall.compat.rpc.backend_registry import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from farcall.compat.rpc.constants import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT
from farcall.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from farcall.ids import WorkerInfo
from farcall.runtime.context import current_agent

PyRRef = RRef

__all__ = [
    "AllGatherStates",
    "BackendType",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_generation = 0


def is_available() -> bool:
    """Whether there is RPC: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """See `farcall.rpc.init_rpc`."""
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_of(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = construct_rpc_backend_options(backend)
    own = backend.value.init_backend_handler in OWN_HANDLERS
    store = None if own else _store(rpc_backend_options, rank, world_size)
    autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_of(given: Any) -> Any:
    if given is None:
        return backend_registry.BackendType.TENSORPIPE
    for backend in backend_registry.BackendType:
        if isinstance(given, type(construct_rpc_backend_options(backend))):
            return backend
    raise TypeError(f"Could not infer backend for options {given}")


def _store(given: Any, rank: int, world_size: int | None) -> dist.Store:
    """For a backend of the user's own."""
    global _generation  # noqa: PLW0603
    if world_size:
        store, _, _ = next(dist.rendezvous(given.init_method, rank=rank, world_size=world_size))
    else:
        store = dist._create_store_from_options(given, rank)
    store.set_timeout(timedelta(seconds=given.rpc_timeout))
    _generation += 1
    return dist.PrefixStore(f"rpc_prefix_{_generation - 1}", store)


def _validate_rpc_args(
    backend: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    for value, kind in (
        (backend, backend_registry.BackendType),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(value, kind):
            raise RuntimeError(
                f"Argument {value} must be of type {kind} but got type {type(value)}"
            )


def _init_rpc_backend(
    backend: Any = None,
    store: dist.Store | None = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    backend = backend_registry.BackendType.TENSORPIPE if backend is None else backend
    _validate_rpc_args(backend, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


def _start(
    store: dist.Store | None,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> TensorPipeAgent:
    """farcall opens a store of its own."""
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    farcall_rpc.init_rpc(
        name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    return TensorPipeAgent(current_agent(), rpc_backend_options, bool(world_size))


def _tensorpipe_options(
    rpc_timeout: float, init_method: str, **more: Any
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **more)


OWN_HANDLERS = [_start]

if not backend_registered("TENSORPIPE"):
    BackendType = register_backend("TENSORPIPE", _tensorpipe_options, _start).__class__


# Debugging.


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts of references, as text, under torch's names for them."""
    references = current_agent().references
    counts, holders = references.statistics(), references.holders()
    return {
        "num_owner_rrefs": str(len(holders)),
        "num_forks": str(sum(holders)),
        "num_pending_futures": str(counts["creating"]),
        "num_pending_users": str(counts["registering"] + counts["pinned_transfers"]),
    }


@_require_initialized
def _get_debug_info() -> dict[str, str]:
    return {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **autograd._get_debug_info(),
    }


def enable_gil_profiling(flag: bool) -> None:
    """Accepted: farcall's native part does not wait for the interpreter's lock to be measured."""
