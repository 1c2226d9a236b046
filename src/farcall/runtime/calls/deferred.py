"""Return values that come later than the function returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from farcall.errors import InvalidResult
from farcall.torch_internals import Future as TorchFuture
from farcall.torch_internals import wrapped_async_rpc_function

ASYNC_MARK = wrapped_async_rpc_function


class Deferred(NamedTuple):
    """Returned by farcall's own handlers: the call's value is that of this future, later.

    `stop` is called if no caller wants the value any more. The future may never complete then.
    """

    future: TorchFuture[Any]
    stop: Callable[[], None] | None = None


def result_of(function: Callable[..., Any], result: Any) -> Any:
    """Return a function's result, `Deferred` if it is marked async and gave a future of it.

    Raises:
        InvalidResult: a function marked with `async_execution` did not return a future.
    """
    if not hasattr(function, ASYNC_MARK):
        return result
    if isinstance(result, TorchFuture):
        return Deferred(result)
    if isinstance(getattr(function, ASYNC_MARK), torch.jit.ScriptFunction):
        raise InvalidResult(
            f"Async functions must return an IValue of Future type, but got {type(result).__name__}"
        )
    raise InvalidResult(
        "Functions decorated with @farcall.functions.async_execution must return a "
        f"torch.futures.Future object, but got {type(result).__name__}"
    )
