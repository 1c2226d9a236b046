"""Timeouts as users give them."""

from __future__ import annotations

import math
import numbers

UNSET_RPC_TIMEOUT = -1.0


def validate_timeout(value: object, what: str = "timeout", *, allow_unset: bool = False) -> float:
    """Return a timeout in seconds, checked: 0 is none, and so is infinity, returned as 0.

    Args:
        value: what the user passed.
        what: its name, for messages.
        allow_unset: also let `UNSET_RPC_TIMEOUT` (-1, "the agent's default") through.

    Raises:
        TypeError: not a real number, or a bool.
        ValueError: negative or not a number (NaN).
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number of seconds, not {type(value).__name__}")
    try:
        seconds = float(value)
    except OverflowError:  # of an int, or a fraction
        seconds = -math.inf if value < 0 else math.inf
    if allow_unset and seconds == UNSET_RPC_TIMEOUT:
        return seconds
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{what} must be 0 (none) or a positive number of seconds, not {value}")
    return 0.0 if math.isinf(seconds) else seconds


def seconds_or_default(timeout: float) -> float | None:
    """Return a timeout as users give it, for an agent: None for its default.

    Raises:
        TypeError, ValueError: it is not a number of seconds.
    """
    if timeout.__class__ is float and timeout == UNSET_RPC_TIMEOUT:
        return None
    seconds = validate_timeout(timeout, allow_unset=True)
    return None if seconds == UNSET_RPC_TIMEOUT else seconds


def ran_too_long(seconds: float) -> str:
    """Return the first words of the error of a call that took longer than so many seconds.

    PyTorch's error has the same words, and programs look for them.
    """
    return f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms)"
