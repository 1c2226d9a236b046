"""Clipping the gradients of one context on all owners."""

from __future__ import annotations

import torch

from farcall.optim.owners import Owners
from farcall.optim.parameters import Norms


def clip_norm(
    owners: Owners, context_id: int, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """See `DistributedOptimizer.clip_grad_norm_`."""
    each: dict[str, Norms | None] = owners.call("computing norms", "norms", context_id, norm_type)
    found = [norms for norms in each.values() if norms is not None]
    if not found:
        return torch.tensor(0.0)
    values = torch.cat([norms.values for norms in found])
    numbers = torch.tensor([number for norms in found for number in norms.numbers])
    # In the order of one process, so that the sum is the same to the last bit.
    total: torch.Tensor = torch.linalg.vector_norm(values[numbers.argsort()], norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for the gradients of context {context_id} is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients by "
            "the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = max_norm / (total + 1e-6)
    if not factor >= 1.0:  # NaN, too
        owners.call("scaling gradients", "scale", context_id, factor)
    return total
