"""Steps of torch's optimizers without the wrapper that torch puts around `step`.

The wrapper calls hooks and marks the step for the profiler. Where nobody has asked for either, it
still takes longer than the step of a few small parameters.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import _profiler_enabled, profiler  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def is_watched(optimizer: Optimizer) -> bool:
    """Whether the wrapper has something to do: hooks, or a profiler that runs."""
    return bool(
        profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or _profiler_enabled()
    )


def take_step(optimizer: Optimizer) -> Any:
    """`optimizer.step()`."""
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not hasattr(step, "hooked") or is_watched(optimizer):
        return optimizer.step()
    return step.__wrapped__(optimizer)
