"""Calls as bytes, for libraries that have none with tensors of their own.

Tensors go as NumPy arrays, whose pickles are much faster than torch's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def to_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value


def to_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def pack_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    return pickle.dumps((function, tuple(map(to_array, args))), protocol=5)


def run_packed(data: bytes) -> bytes:
    """Calls, and packs what that returns."""
    function, args = pickle.loads(data)
    return pickle.dumps(to_array(function(*map(to_tensor, args))), protocol=5)


def unpack(data: bytes) -> Any:
    return to_tensor(pickle.loads(data))
