"""`init_rpc` of torch.distributed.rpc, and the backends TENSORPIPE and PROCESS_GROUP."""

from __future__ import annotations

import copy
import enum
import numbers
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch import distributed

from farcall.compat import autograd
from farcall.compat.rpc import api, backend_registry
from farcall.compat.rpc.agents import RpcAgent, TensorPipeAgent
from farcall.compat.rpc.quirks import LIKE_TORCH
from farcall.errors import RendezvousTimeout
from farcall.rpc import start_default_agent
from farcall.runtime.membership.stores import bounded
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.process_group import ProcessGroupRpcBackendOptions
from farcall.runtime.options.tensorpipe import TensorPipeRpcBackendOptions
from farcall.torch_internals import attribute_of, create_store_from_options

# torch passes these names on from C, or by *, without saying so in a way that mypy accepts.
dist: Any = distributed

_generation = 0


def is_available() -> bool:
    """Return whether there is RPC: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """See `farcall.rpc.init_rpc`."""
    if backend is not None and not backend_registry.is_backend(backend):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_of(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    _check_rank(rpc_backend_options.init_method, rank, world_size)
    own = backend.value.init_backend_handler in _own
    store = None if own else _store(rpc_backend_options, rank, world_size)
    autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _check_rank(init_method: str, rank: int, world_size: int | None) -> None:
    """torch.distributed.rpc wants ranks also where farcall can do without."""
    if world_size or rank >= 0:
        return
    url = urlsplit(init_method)
    if url.scheme == "env" and "RANK" not in os.environ:
        raise ValueError(
            "Error initializing torch.distributed using env:// rendezvous: environment variable "
            "RANK expected, but not set"
        )
    if url.scheme in ("file", "tcp") and "rank=" not in url.query:
        raise ValueError(
            f"Error initializing torch.distributed using {url.scheme}:// rendezvous: rank "
            "parameter missing"
        )


def _backend_of(given: Any) -> Any:
    if given is None:
        return backend_registry.BackendType.TENSORPIPE
    for backend in backend_registry.BackendType:
        if isinstance(given, type(backend_registry.construct_rpc_backend_options(backend))):
            return backend
    raise TypeError(f"Could not infer backend for options {given}")


def _store(given: Any, rank: int, world_size: int | None) -> Any:
    """Return the store for a backend of the user's own."""
    global _generation  # noqa: PLW0603

    def open_it() -> Any:
        if not world_size:
            return create_store_from_options(given, rank)
        return next(dist.rendezvous(given.init_method, rank=rank, world_size=world_size))[0]

    # A store that answers torch's client by halves is waited for without end.
    late = RendezvousTimeout(
        f"no store answered at {given.init_method} in {given.rpc_timeout:.1f} s, or the other "
        "workers did not come there"
    )
    store = bounded(open_it, given.rpc_timeout or threading.TIMEOUT_MAX, late)
    store.set_timeout(timedelta(seconds=given.rpc_timeout))
    _generation += 1
    return dist.PrefixStore(f"rpc_prefix_{_generation - 1}", store)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    for value, kind in (
        (backend, enum.Enum),
        (store, (dist.Store, type(None))),  # None where our own backends open one
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
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    backend = backend_registry.BackendType.TENSORPIPE if backend is None else backend
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


_own: list[Any] = []  # handlers of backends whose agents open a store of their own


def handler(kind: type[RpcBackendOptions], agent: type[RpcAgent]) -> Callable[..., RpcAgent]:
    """Return an `init_backend_handler` that starts farcall's agent.

    Args:
        kind: of the backend's options.
        agent: what `_get_current_rpc_agent` gives.
    """

    def start(
        store: Any,
        name: str,
        rank: int,
        world_size: int | None,
        rpc_backend_options: RpcBackendOptions,
    ) -> RpcAgent:
        if not isinstance(rpc_backend_options, kind):
            raise TypeError(
                f"`rpc_backend_options` must be a `{kind.__name__}`. {rpc_backend_options}"
            )
        options = rpc_backend_options
        if store is not None:
            options = copy.copy(options)
            options.store = store
        made = start_default_agent(name, rank, world_size, options, LIKE_TORCH)
        return agent(made, rpc_backend_options, bool(world_size))

    _own.append(start)
    return start


# For backends that are options of farcall with an endpoint of their own.
start_agent = handler(RpcBackendOptions, RpcAgent)


def register_own(name: str, kind: type[RpcBackendOptions], agent: type[RpcAgent]) -> None:
    """Add a backend that comes with farcall. For the arguments, see `handler`."""

    def options(rpc_timeout: float, init_method: str, **more: Any) -> RpcBackendOptions:
        return kind(rpc_timeout=rpc_timeout, init_method=init_method, **more)

    backend_registry.register_backend(name, options, handler(kind, agent))


register_own("PROCESS_GROUP", ProcessGroupRpcBackendOptions, RpcAgent)
register_own("TENSORPIPE", TensorPipeRpcBackendOptions, TensorPipeAgent)
setattr(
    backend_registry,
    attribute_of("tensorpipe_init_backend_handler"),
    backend_registry.BackendType.TENSORPIPE.value.init_backend_handler,
)
