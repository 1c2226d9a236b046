"""The names of `torch.distributed.rpc.options`."""

from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.process_group import ProcessGroupRpcBackendOptions
from farcall.runtime.options.tensorpipe import TensorPipeRpcBackendOptions

__all__ = ["ProcessGroupRpcBackendOptions", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]
