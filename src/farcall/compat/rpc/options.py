"""What `torch.distributed.rpc.options` has."""

from farcall.runtime.options import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]
