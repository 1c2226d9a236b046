"""What `torch.distributed.optim` is while farcall stands in for it: torch's, with our optimizer.

Its other classes need no RPC.
"""

import torch.distributed.optim

from farcall.optim import DistributedOptimizer

__all__ = torch.distributed.optim.__all__

globals().update(
    {name: value for name, value in vars(torch.distributed.optim).items() if name[:2] != "__"},
    DistributedOptimizer=DistributedOptimizer,
)
