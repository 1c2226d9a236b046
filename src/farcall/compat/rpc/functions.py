"""What `torch.distributed.rpc.functions` has."""

from farcall.functions import async_execution

__all__ = ["async_execution"]
