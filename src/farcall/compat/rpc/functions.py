"""The names of `torch.distributed.rpc.functions`."""

from farcall.functions import async_execution

__all__ = ["async_execution"]
