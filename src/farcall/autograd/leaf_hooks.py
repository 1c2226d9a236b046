"""Hooks of the nodes that accumulate gradients of leaves: `node.register_hook`.

Distributed passes don't run these nodes. So their hooks are called when a gradient was added to a
context. Finding out whether a node has some takes microseconds for each leaf, so that is done only
where somebody says that there may be any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def call_leaf_hooks(gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Call the hooks of these leaves with their gradients. What they return is not used."""
    for leaf, gradient in gradients:
        for hook in _hooks_of(leaf):
            hook((), (gradient,))


def _hooks_of(leaf: torch.Tensor) -> list[Callable[..., Any]]:
    # Only who adds a hook is given the table of them.
    handle = get_gradient_edge(leaf).node.register_hook(lambda *_: None)
    table = handle.hooks_dict_ref()
    handle.remove()
    return [] if table is None else list(table.values())
