"""The names of `torch.distributed.rpc.internal`: torch's own, which is plain Python.

Imported before farcall stands in for torch, so these are the originals. Their pickler looks for
the classes of references where torch.distributed.rpc is, and so finds farcall's.
"""

from torch.distributed.rpc.internal import (
    PythonUDF,
    RemoteException,
    RPCExecMode,
    deserialize,
    serialize,
)

from farcall.torch_internals import InternalRPCPickler as _InternalRPCPickler
from farcall.torch_internals import build_rpc_profiling_key as _build_rpc_profiling_key
from farcall.torch_internals import internal_rpc_pickler as _internal_rpc_pickler
from farcall.torch_internals import start_record_function as _start_record_function

__all__ = [
    "PythonUDF",
    "RPCExecMode",
    "RemoteException",
    "_InternalRPCPickler",
    "_build_rpc_profiling_key",
    "_internal_rpc_pickler",
    "_start_record_function",
    "deserialize",
    "serialize",
]
