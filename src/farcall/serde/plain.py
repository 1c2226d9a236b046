"""The compiled half of the serializer: plain values and dense CPU tensors as pickle, and back.

It is an accelerator and nothing else: what it writes any unpickler reads, what it does not take the
picklers do. `native/plain/plain.hpp` says which values are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farcall.serde.shared import file_and_address

if TYPE_CHECKING:
    from farcall._native import Plain
else:
    try:
        from farcall._native import Plain
    except ImportError:
        Plain = None


def accelerator(handle_type: type | None, check: Callable[[Any], None] | None) -> Plain | None:
    """Return the compiled half, for this torch; None if it was not built, or torch is too old.

    It is stateless, and safe from any thread.

    Args:
        handle_type: objects of exactly this type stay out of its pickles.
        check: is called with each of them first.
    """
    # A C table for exchanging tensors, which torch has since 2.10.
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if Plain is None or api is None:
        return None
    try:
        return Plain(torch.Tensor, api, handle_type, check, file_and_address)
    except ValueError:
        return None  # a table of a later kind
