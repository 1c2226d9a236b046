"""Messages whose tensors share no memory.

Tensors that share memory arrive sharing memory: a change in place of one is seen in the others. In
the local run each is cloned by itself. So that both runs mean the same, the distributed one clones
those that share before it sends them. The same tensor twice stays one tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from simulator.gradients.execute import Bundle, unpack


def unshared(thing: Any) -> Any:
    """Return the container with clones in place of tensors that share memory with another one.

    A leaf stays what it is.
    """
    owners: dict[int, torch.Tensor] = {}
    for tensor in unpack(thing):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            key = tensor.untyped_storage().data_ptr()
            if key not in owners or (tensor.is_leaf and tensor.requires_grad):
                owners[key] = tensor
    with torch.enable_grad():
        return _unshared(thing, {}, owners)


def _unshared(thing: Any, seen: dict[int, torch.Tensor], owners: dict[int, torch.Tensor]) -> Any:
    if isinstance(thing, torch.Tensor):
        if id(thing) not in seen:
            seen[id(thing)] = _of_its_own(thing, owners)
        return seen[id(thing)]
    if isinstance(thing, tuple | list):
        return type(thing)(_unshared(part, seen, owners) for part in thing)
    if isinstance(thing, dict):
        return {key: _unshared(part, seen, owners) for key, part in thing.items()}
    if isinstance(thing, Bundle):
        return Bundle([_unshared(part, seen, owners) for part in thing.things])
    return thing


def _of_its_own(tensor: torch.Tensor, owners: dict[int, torch.Tensor]) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    if owners[tensor.untyped_storage().data_ptr()] is tensor:
        return tensor
    return tensor.clone() if tensor.requires_grad else tensor.detach().clone()
