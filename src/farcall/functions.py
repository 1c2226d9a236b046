"""`rpc.functions`: marks on functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from farcall.runtime.calls.deferred import ASYNC_MARK
from farcall.runtime.calls.graph_breaks import breaks_graphs

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["async_execution"]


def __dir__() -> list[str]:
    return __all__


@breaks_graphs
def async_execution(fn: F) -> F:
    """Mark a function whose result is that of the `torch.futures.Future` which it returns.

    When such a function is called remotely, no thread of the callee waits for the future: the
    answer is sent when it is done. The future may come from `rpc_async`, from `then`, or from the
    constructor. With `staticmethod` and `classmethod` this must be the inner decorator, with
    `torch.jit.script` the outer one. Called locally, the function does what it would without.

        @rpc.functions.async_execution
        def add_on(to, x, y):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.wait() + 1)

        rpc.rpc_sync("worker1", add_on, args=("worker2", torch.ones(2), 1))

    Raises (at the caller): InvalidResult if the function returns anything but a future.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        # It has no such attributes; with them the function goes by name.
        module, _, name = fn.qualified_name.removeprefix("__torch__.").rpartition(".")
        wrapper.__module__ = module or "__main__"
        wrapper.__qualname__ = wrapper.__name__ = name
    setattr(wrapper, ASYNC_MARK, fn)
    return wrapper  # type: ignore[return-value]
