"""Remote work of TorchScript code: calls, references, gradients.

torch compiles all this to nodes of its own, which need an agent, futures and references in C++.
`scripted_graphs` puts calls of `do` in their place, which does here what the node should.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from farcall.compat import autograd
from farcall.compat.rpc import api
from farcall.compat.rpc.constants import UNSET_RPC_TIMEOUT
from farcall.compat.rpc.scripted_references import boxed, unboxed
from farcall.compat.rpc.scripts import for_torch, handed_on
from farcall.rref import RRef
from farcall.runtime.context import current_context, is_at_work, reset_context, set_context, waiting
from farcall.torch_internals import python_cu

# Of the inputs a node has the first ones.


def _rpc_async(
    to: Any, function: str, args: Any = (), kwargs: Any = (), timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    return for_torch(api.rpc_async(to, compiled_function(function), args, dict(kwargs), timeout))


def _rpc_sync(
    to: Any, function: str, args: Any = (), kwargs: Any = (), timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    return api.rpc_sync(to, compiled_function(function), args, dict(kwargs), timeout)


def _rpc_remote(
    to: Any, function: str, args: Any = (), kwargs: Any = (), timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    return api.remote(to, compiled_function(function), args, dict(kwargs), timeout)


def compiled_function(name: str) -> Any:
    """Return a function or method by the name that TorchScript has for it."""
    return python_cu.find_function(name)


def _owner(_: RRef[Any]) -> Any:
    raise NotImplementedError(
        "what RRef.owner() gives in TorchScript can only be the worker that a call goes to: use "
        "RRef.owner_name()"
    )


def _save(value: Any, *_: Any) -> None:
    raise RuntimeError(f"RRef jit pickling is only allowed inside RPC calls: {value!r}")


def _let_others_work(future: Any) -> None:
    """Wait before torch does, in the thread of a function, so that another one can run.

    Elsewhere torch's own wait leaves its thread to others.
    """
    if is_at_work():
        with waiting(), contextlib.suppress(Exception):  # torch's wait has the error, too
            future.wait()


def _unwrapped(value: Any) -> Any:
    """Return the value of a future of Python's: to TorchScript, an opaque object."""
    return value


LET_OTHERS_WORK = "farcall::let_others_work"
UNWRAPPED = "farcall::unwrapped"
OWNER_NAME = "aten::owner_name"
CALLS: dict[str, Callable[..., Any]] = {
    "prim::rpc_async": _rpc_async,
    "prim::rpc_sync": _rpc_sync,
    "prim::rpc_remote": _rpc_remote,
}
GRADIENTS: dict[str, Callable[..., Any]] = {
    "aten::dist_backward": autograd.backward,
    "aten::get_gradients": autograd.get_gradients,
}
# By kind of node.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **CALLS,
    **GRADIENTS,
    # Found when called: compat replaces this method.
    "aten::to_here": lambda rref, *timeout: rref.to_here(*timeout),
    "aten::local_value": RRef.local_value,
    "aten::is_owner": RRef.is_owner,
    "aten::confirmed_by_owner": RRef.confirmed_by_owner,
    OWNER_NAME: RRef.owner_name,
    "aten::owner": _owner,
    "aten::save": _save,
}
_others = {LET_OTHERS_WORK: _let_others_work, UNWRAPPED: _unwrapped}


def note_python(function: Callable[..., Any]) -> str:
    """Return a kind for a Python function with references that compiled code calls."""
    kind = f"python::{len(_others)}"
    _others[kind] = function
    return kind


@torch.jit.ignore  # type: ignore[untyped-decorator]
def do(kind: str, inputs: Any, references: bool) -> Any:
    """Run a node of this kind: compiled code calls this.

    Args:
        references: whether there are references among what it takes or gives.
    """
    function = FUNCTIONS.get(kind) or _others[kind]
    token = set_context(current_context() or handed_on())
    try:
        if references:
            return boxed(function(*unboxed(inputs)))
        return function(*inputs)
    finally:
        reset_context(token)
