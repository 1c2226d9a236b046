"""Calls in the traces of torch.profiler, under the names that torch.distributed.rpc gives them.

The caller has an event `rpc_sync#fn(w0 -> w1)` for each call, from its beginning to its end; of
`remote`, for as long as it takes to send. The callee has one of the same length as the function,
around the function's operators. A profiler sees the threads that serve calls only if it is told to
look at all threads: `experimental_config=torch._C._profiler._ExperimentalConfig(
profile_all_threads=True)`. The events of backward passes are in `autograd.runner`.

Whether a profiler runs is asked before a call is made as an event: `is_profiler_enabled()`,
which takes some nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from farcall.ids import WorkerInfo
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future
from farcall.runtime.references.handles import RefHandle
from farcall.torch_internals import Future as TorchFuture
from farcall.torch_internals import find_builtin, is_profiler_enabled

Call = tuple[
    str | int | WorkerInfo,
    Callable[..., Any],
    Sequence[Any],
    Mapping[str, Any] | None,
    float | None,
]

_NOTHING: AbstractContextManager[Any] = nullcontext()


def event(name: str) -> AbstractContextManager[Any]:
    """Return a profiler's event that lasts as long as the block, if a profiler runs."""
    return record_function(name) if is_profiler_enabled() else _NOTHING


def call(agent: Agent, name: str | None, call: Call) -> Any:
    """`Agent.call` as an event.

    Args:
        name: of the called function, if `function` is not it.
    """
    with record_function(event_name(agent, "sync", name, call)):
        return agent.call(*call)


def call_async(agent: Agent, name: str | None, call: Call, maker: FrameType) -> Future[Any]:
    """`Agent.call_async` as an event, which ends with the future."""
    lasting = record_function(event_name(agent, "async", name, call))
    lasting.__enter__()  # type: ignore[no-untyped-call]
    try:
        future = agent.call_async(*call, maker)
    except BaseException:
        lasting.__exit__(None, None, None)
        raise
    # Past our class, which counts a callback as interest in the result.
    TorchFuture.add_done_callback(future, lambda _: lasting.__exit__(None, None, None))
    return future


def remote(agent: Agent, name: str | None, call: Call, concurrency: int = 0) -> RefHandle:
    """`Agent.remote` as an event."""
    with record_function(event_name(agent, "remote", name, call)):
        return agent.remote(*call, concurrency)


def event_name(agent: Agent, kind: str, name: str | None, call: Call) -> str:
    """Return the name of the event of a call of that kind: "sync", "async" or "remote"."""
    to = call[0]  # which may not be known yet
    peer = agent.directory.known(to)
    to = peer.name if peer is not None else to.name if isinstance(to, WorkerInfo) else to
    return f"rpc_{kind}#{name or described(call[1])}({agent.me.name} -> {to})"


def described(function: Any) -> str:
    """Return a function's name in traces: `aten::add`, or the qualified name."""
    builtin: str | None = find_builtin(function)
    if builtin is not None:
        return builtin
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.qualified_name)
    return getattr(function, "__qualname__", type(function).__qualname__)
