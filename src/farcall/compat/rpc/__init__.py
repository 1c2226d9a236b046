"""`torch.distributed.rpc` while farcall stands in for it."""

import importlib

from farcall.compat.rpc import api as api
from farcall.compat.rpc import backend_registry as backend_registry
from farcall.compat.rpc import constants as constants
from farcall.compat.rpc import functions as functions
from farcall.compat.rpc import internal as internal
from farcall.compat.rpc import options as options
from farcall.compat.rpc.agents import RpcAgent as RpcAgent
from farcall.compat.rpc.agents import TensorPipeAgent as TensorPipeAgent
from farcall.compat.rpc.api import AllGatherStates as AllGatherStates
from farcall.compat.rpc.api import PyRRef as PyRRef
from farcall.compat.rpc.api import RRef as RRef
from farcall.compat.rpc.api import _all_gather as _all_gather
from farcall.compat.rpc.api import _barrier as _barrier
from farcall.compat.rpc.api import _cleanup_python_rpc_handler as _cleanup_python_rpc_handler
from farcall.compat.rpc.api import (
    _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs,
)
from farcall.compat.rpc.api import _destroy_rref_context as _destroy_rref_context
from farcall.compat.rpc.api import _get_current_rpc_agent as _get_current_rpc_agent
from farcall.compat.rpc.api import _is_current_rpc_agent_set as _is_current_rpc_agent_set
from farcall.compat.rpc.api import _require_initialized as _require_initialized
from farcall.compat.rpc.api import _reset_current_rpc_agent as _reset_current_rpc_agent
from farcall.compat.rpc.api import _set_and_start_rpc_agent as _set_and_start_rpc_agent
from farcall.compat.rpc.api import _set_rpc_timeout as _set_rpc_timeout
from farcall.compat.rpc.api import _wait_all as _wait_all
from farcall.compat.rpc.api import get_rpc_timeout as get_rpc_timeout
from farcall.compat.rpc.api import get_worker_info as get_worker_info
from farcall.compat.rpc.api import remote as remote
from farcall.compat.rpc.api import rpc_async as rpc_async
from farcall.compat.rpc.api import rpc_sync as rpc_sync
from farcall.compat.rpc.api import shutdown as shutdown
from farcall.compat.rpc.backend_registry import backend_registered as backend_registered
from farcall.compat.rpc.backend_registry import (
    construct_rpc_backend_options as construct_rpc_backend_options,
)
from farcall.compat.rpc.backend_registry import init_backend as init_backend
from farcall.compat.rpc.backend_registry import register_backend as register_backend
from farcall.compat.rpc.debugging import _get_debug_info as _get_debug_info
from farcall.compat.rpc.debugging import (
    _rref_context_get_debug_info as _rref_context_get_debug_info,
)
from farcall.compat.rpc.debugging import enable_gil_profiling as enable_gil_profiling
from farcall.compat.rpc.options import (
    ProcessGroupRpcBackendOptions as ProcessGroupRpcBackendOptions,
)
from farcall.compat.rpc.options import RpcBackendOptions as RpcBackendOptions
from farcall.compat.rpc.options import TensorPipeRpcBackendOptions as TensorPipeRpcBackendOptions
from farcall.compat.rpc.starting import _init_rpc_backend as _init_rpc_backend
from farcall.compat.rpc.starting import _validate_rpc_args as _validate_rpc_args
from farcall.compat.rpc.starting import init_rpc as init_rpc
from farcall.compat.rpc.starting import is_available as is_available
from farcall.ids import WorkerInfo as WorkerInfo

_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions

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


def __getattr__(name: str) -> object:
    # Another class when a backend was added.
    if name == "BackendType":
        return backend_registry.BackendType
    # With torch, it is there as soon as C++ needed it.
    if name == "rref_proxy":
        return importlib.import_module("torch.distributed.rpc.rref_proxy")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
