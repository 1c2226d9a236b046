"""What `torch.distributed.rpc.options` has."""

from farcall.runtime.options import (
    ProcessGroupRpcBackendOptions,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
)

__all__ = ["ProcessGroupRpcBackendOptions", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]
