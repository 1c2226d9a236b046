"""The names of `torch.distributed.rpc.backend_registry`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from farcall.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The parts of a backend: functions that make its options and its agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _name_of(self: enum.Enum) -> str:
    return f"BackendType.{self.name}"


def _backend_type(members: dict[str, BackendValue]) -> Any:
    made = enum.Enum("BackendType", members)  # type: ignore[misc]
    made.__repr__ = _name_of  # type: ignore[assignment,method-assign]
    return made


BackendType = _backend_type({})
_tensorpipe_init_backend_handler: Callable[..., Any]  # set where it is made


def is_backend(backend: Any) -> bool:
    """Return whether it is a member of `BackendType`, now or before others were added."""
    return isinstance(backend, enum.Enum) and isinstance(backend.value, BackendValue)


def backend_registered(backend_name: str) -> bool:
    """Return whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend.

    Args:
        construct_rpc_backend_options_handler: `(rpc_timeout, init_method, **kwargs)` gives options.
        init_backend_handler: with store, name, rank, world_size and rpc_backend_options gives an
            agent.

    Returns:
        Its member of `BackendType`, which is a new class after that.

    Raises:
        RuntimeError: there is one of that name.
    """
    global BackendType  # noqa: PLW0603
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _backend_type(
        {backend_name: value, **{member.name: member.value for member in BackendType}}
    )
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the agent of a backend."""
    return backend.value.init_backend_handler(*args, **kwargs)
