"""What `torch.distributed.optim` is while farcall stands in for it: torch's, with our optimizer."""

from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
    _FunctionalAdadelta,
    _FunctionalAdagrad,
    _FunctionalAdam,
    _FunctionalAdamax,
    _FunctionalAdamW,
    _FunctionalRMSprop,
    _FunctionalRprop,
    _FunctionalSGD,
    _get_in_backward_optimizers,
    _NamedOptimizer,
    as_functional_optim,
)

from farcall.optim import DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "_FunctionalAdadelta",
    "_FunctionalAdagrad",
    "_FunctionalAdam",
    "_FunctionalAdamW",
    "_FunctionalAdamax",
    "_FunctionalRMSprop",
    "_FunctionalRprop",
    "_FunctionalSGD",
    "_NamedOptimizer",
    "_apply_optimizer_in_backward",
    "_get_in_backward_optimizers",
    "as_functional_optim",
]
