"""Checks of the calls that users make, before they are made."""

from __future__ import annotations

from collections.abc import Mapping

from farcall.plain import whole_number
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, seconds_or_default

_ARGUMENTS = (tuple, list)


def check_call(func: object, args: object, kwargs: object, timeout: float) -> float | None:
    """Check the parts of a call; return its timeout for an agent.

    Raises:
        TypeError, ValueError: the parts make no call.
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    if args is not None and not isinstance(args, _ARGUMENTS):
        raise TypeError(
            f"args must be a tuple of the positional arguments, not {type(args).__name__}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
    return None if timeout is UNSET_RPC_TIMEOUT else seconds_or_default(timeout)


def check_concurrency(concurrency: object) -> int:
    """Return how many methods of an object may run at once; 0 for any number, as None says.

    Raises:
        TypeError, ValueError: `concurrency` is neither None nor a whole number from 1.
    """
    if concurrency is None:
        return 0
    return whole_number("concurrency", concurrency, 1)
