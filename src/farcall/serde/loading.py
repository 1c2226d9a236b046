"""The context of a message that is being unpickled: its needs from outside its bytes.

Pickle calls module-level functions and hands them nothing but what the bytes say. A reference
handle needs the agent's own object instead, and the autograd layer must know which tensors came
in. Both hang on a context variable that is set only while one message is being loaded, so loads on
other threads, and loads that user code starts inside a load, see their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

Attach = Callable[[torch.Tensor], torch.Tensor]


class Arriving(NamedTuple):
    """The context for `load_reference` and `attached`, while a message is loaded."""

    references: Sequence[Any]
    attach: Attach | None


arriving: ContextVar[Arriving | None] = ContextVar("farcall_arriving", default=None)


def load_reference(index: int) -> Any:
    """Return the `index`-th of the references given to `Serializer.load`.

    Reducers of reference handles name it as their rebuild function: `(load_reference, (index,))`.

    Raises:
        LookupError: outside of a load, or the message has fewer references.
    """
    current = arriving.get()
    if current is None or not 0 <= index < len(current.references):
        raise LookupError(f"the message names reference {index}, but did not bring it")
    return current.references[index]


def attached(
    data: torch.Tensor, leaf: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.requires_grad_
) -> torch.Tensor:
    """Return a stand-in for a tensor requiring grad that arrived.

    If it was recorded it is linked to its origin, else it is a leaf. Called in the order of
    `Payload.tensors`.

    Args:
        data: the tensor, which does not require grad yet; it is used up.
        leaf: makes it a leaf.
    """
    current = arriving.get()
    if current is None or current.attach is None:
        return leaf(data)
    return current.attach(data)
