"""What `torch.distributed.rpc.options` has."""

from farcall.runtime.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from farcall.runtime.process_group_options import ProcessGroupRpcBackendOptions

__all__ = ["ProcessGroupRpcBackendOptions", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]
