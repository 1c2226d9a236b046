"""Steps of torch's optimizers without the wrappers that torch puts around `step`.

One calls hooks and marks the step for the profiler. Where neither is wanted, it still
takes longer than the step of a few small parameters. The other switches grad off, with much that
is for torch.compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from farcall import torch_internals as internals

_SWITCHES_GRAD: Any = internals.use_grad_for_differentiable(lambda: None).__code__


def is_watched(optimizer: Optimizer) -> bool:
    """Return whether the wrapper has something to do: hooks, or a profiler that runs."""
    return bool(
        internals.is_profiler_enabled()
        or internals.optimizer_step_pre_hooks(optimizer)
        or internals.optimizer_step_post_hooks(optimizer)
        or internals.global_optimizer_pre_hooks
        or internals.global_optimizer_post_hooks
        or internals.profiler_enabled()
    )


def take_step(optimizer: Optimizer) -> Any:
    """`optimizer.step()`."""
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not hasattr(step, "hooked") or is_watched(optimizer):
        return optimizer.step()
    inner = step.__wrapped__
    if getattr(inner, "__code__", None) is not _SWITCHES_GRAD:
        return inner(optimizer)
    before = torch.is_grad_enabled()
    internals.set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        return inner.__wrapped__(optimizer)
    finally:
        internals.set_grad_enabled(before)
