"""Information of torch.distributed.rpc about itself, as text under torch's names."""

from __future__ import annotations

from farcall.compat import autograd
from farcall.compat.rpc.api import _get_current_rpc_agent, _require_initialized
from farcall.runtime.current import current_agent


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts of references, as text, under torch's names for them."""
    references = current_agent().references
    counts, holders = references.statistics(), references.holders()
    return {
        "num_owner_rrefs": str(len(holders)),
        "num_forks": str(sum(holders)),
        "num_pending_futures": str(counts["creating"]),
        "num_pending_users": str(counts["registering"] + counts["pinned_transfers"]),
    }


@_require_initialized
def _get_debug_info() -> dict[str, str]:
    return {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **autograd._get_debug_info(),
    }


def enable_gil_profiling(flag: bool) -> None:
    """Accept the flag without effect: farcall's native part does not wait for the GIL."""
