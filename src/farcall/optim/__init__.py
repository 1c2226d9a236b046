"""Optimizers of parameters on several workers, as in `torch.distributed.optim`.

from farcall.optim import DistributedOptimizer

optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs, lr=0.05)
with dist_autograd.context() as context_id:
    dist_autograd.backward(context_id, [loss])
    optimizer.step(context_id)
"""

from farcall.optim.handle import DistributedOptimizer
from farcall.optim.part import FUNCTIONS, TYPES

__all__ = ["FUNCTIONS", "TYPES", "DistributedOptimizer"]


def __dir__() -> list[str]:
    return __all__
