"""What `torch.distributed.rpc.options` has."""

from farcall.runtime.options import RpcBackendOptions
from farcall.runtime.process_group_options import ProcessGroupRpcBackendOptions
from farcall.runtime.tensorpipe_options import TensorPipeRpcBackendOptions

__all__ = ["ProcessGroupRpcBackendOptions", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]
