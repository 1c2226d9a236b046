"""Remote calls and references, shaped like `torch.distributed.rpc`.

    from farcall import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    rpc.shutdown()

The functions here work on the process's default agent, which `init_rpc` makes and `shutdown` ends;
inside a function that was called remotely they work on the agent that received the call. All may
be called from any thread. Timeouts are in seconds; 0 means none, and -1 (`UNSET_RPC_TIMEOUT`) the
default given to `init_rpc`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from farcall import functions
from farcall.autograd.autograd import Autograd
from farcall.errors import (
    Cancelled,
    DuplicateName,
    DuplicateWorker,
    FarcallError,
    FunctionNotFound,
    InvalidName,
    InvalidReference,
    LinkError,
    NotInitialized,
    OwnerDied,
    PeerLost,
    Refused,
    RemoteError,
    RendezvousError,
    RendezvousTimeout,
    RpcTimeout,
    SerializationError,
    UnknownObject,
    UnknownWorker,
)
from farcall.ids import Member, WorkerInfo, check_name
from farcall.members import (
    all_gather,
    barrier,
    explain,
    gather,
    membership,
    on_join,
    on_leave,
    wait_for,
    workers,
)
from farcall.objects import kill, named
from farcall.plain import whole_number
from farcall.rref import RRef
from farcall.runtime.advice import Advice
from farcall.runtime.agent import Agent
from farcall.runtime.calls import profiling, retrying
from farcall.runtime.calls.call_checks import check_call, check_concurrency
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.graph_breaks import breaks_graphs
from farcall.runtime.calls.retrying import Attempts, Retry
from farcall.runtime.context import current_context, set_context
from farcall.runtime.current import current_agent, default_agent, set_default_agent
from farcall.runtime.heap import keep_freed_memory
from farcall.runtime.inspection.reports import MemberReport
from farcall.runtime.membership.roster import MemberEvent
from farcall.runtime.membership.subscriptions import Membership, Subscription
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.credential import Credentials
from farcall.runtime.options.process_group import ProcessGroupRpcBackendOptions, check_backend
from farcall.runtime.options.secret import Secret
from farcall.runtime.options.tensorpipe import TensorPipeRpcBackendOptions
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, validate_timeout
from farcall.runtime.options.types import BackendType
from farcall.runtime.program_end import keep_exit_code
from farcall.runtime.quirks import Quirks
from farcall.runtime.start import start_agent
from farcall.serde import Only, hide_own_frames
from farcall.supervision import Child, Snapshot, get_object, supervise
from farcall.torch_internals import is_profiler_enabled
from farcall.transport.connect.tls_config import TlsConfig

__all__ = [
    "BackendType",
    "Cancelled",
    "Child",
    "DuplicateName",
    "DuplicateWorker",
    "FarcallError",
    "FunctionNotFound",
    "Future",
    "InvalidName",
    "InvalidReference",
    "LinkError",
    "Member",
    "MemberEvent",
    "MemberReport",
    "Membership",
    "NotInitialized",
    "Only",
    "OwnerDied",
    "PeerLost",
    "ProcessGroupRpcBackendOptions",
    "RRef",
    "Refused",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeout",
    "Retry",
    "RpcBackendOptions",
    "RpcTimeout",
    "Secret",
    "SerializationError",
    "Snapshot",
    "Subscription",
    "TensorPipeRpcBackendOptions",
    "TlsConfig",
    "UnknownObject",
    "UnknownWorker",
    "WorkerInfo",
    "all_gather",
    "barrier",
    "cancelled",
    "explain",
    "functions",
    "gather",
    "get_object",
    "get_worker_info",
    "init_rpc",
    "kill",
    "membership",
    "on_join",
    "on_leave",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "supervise",
    "wait_for",
    "workers",
]

Worker = str | int | WorkerInfo


def __dir__() -> list[str]:
    return __all__


EXIT_SECONDS = 0.5  # that a program which ends waits for functions that are still running

_starting = threading.Lock()
_generation = 0
_advice = Advice()
_credentials = Credentials()


def _at_exit() -> None:
    agent = default_agent()
    try:
        if agent is not None:
            agent.close("its program ended without shutdown", EXIT_SECONDS)
    finally:
        keep_exit_code()


def _after_fork_in_child() -> None:
    context: Any = current_context()  # of the function that has forked, if one was called remotely
    agents: set[Agent | None] = {default_agent(), context and context.agent}
    for agent in agents - {None}:
        assert agent is not None
        agent.close_after_fork()
    set_default_agent(None)
    set_context(None)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@breaks_graphs
def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Start this process's agent and meet the other workers.

    Args:
        name: of this worker, unique in the group: letters, digits, "_", ":" and "-", at most 127.
        backend: the backend; None takes the one that the options belong to.
        rank: the id of this worker, unique in the group; -1 takes it from the environment (`RANK`).
        world_size: number of workers, all of which are waited for; None takes it from the
            environment (`WORLD_SIZE`). If the environment has none either, workers join and leave
            at will.
        rpc_backend_options: timeouts, rendezvous, threads, security; see `RpcBackendOptions`.

    Raises:
        RuntimeError: there is an agent already.
        RendezvousTimeout: not all came in time (`rpc_timeout`); the message names the missing.
        DuplicateWorker: another live worker has the name or rank.
        InvalidName: the name can't be that of a worker.
        ValueError, TypeError: another argument makes no sense; the message says which and why.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    options = rpc_backend_options
    if options is None:
        over_group = backend is BackendType.PROCESS_GROUP
        options = ProcessGroupRpcBackendOptions() if over_group else RpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    check_backend(backend, options)
    start_default_agent(name, rank, world_size, options, Quirks(advice=_advice))


def start_default_agent(
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    quirks: Quirks,
    generation: int | None = None,
) -> Agent:
    """Start this process's agent, as `init_rpc` does, and return it.

    For `init_rpc`, for `farcall.local`, and for functions that imitate another system, which say
    in `quirks` how.

    Args:
        generation: number of the group at its store, the same on all workers; None: how many groups
            this process was in.
    """
    global _generation  # noqa: PLW0603
    name, rank = check_name(name), whole_number("rank", rank)
    if world_size is not None:
        world_size = whole_number("world_size", world_size)
    with _starting:
        if default_agent() is not None:
            raise RuntimeError("RPC is already initialized; call shutdown first")
        if generation is None:
            generation = _generation
            _generation += 1
        agent = start_agent(
            name, rank, world_size, options, _credentials, generation, quirks, Autograd
        )
        set_default_agent(agent)
        keep_freed_memory(options.keep_freed_memory)
    return agent


@breaks_graphs
def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Leave the group and end this process's agent. `init_rpc` may be called again afterwards.

    Args:
        graceful: wait until all live workers have called this too and no call is in flight
            anywhere (in a group without a world size: until none is in flight here). Dead workers
            are not waited for. Otherwise end at once: calls in flight fail with Cancelled here
            and PeerLost elsewhere.
        timeout: seconds to wait for the others; 0 for no limit.

    Raises:
        NotInitialized: there is no agent.
        RpcTimeout: the others were not ready in time. The agent is shut down nevertheless.
    """
    seconds = validate_timeout(timeout)
    agent = current_agent()
    try:
        agent.shutdown(graceful, seconds)
    finally:
        if agent.status.is_closed and default_agent() is agent:
            set_default_agent(None)


@breaks_graphs
def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return name and id of a worker, by default of this one.

    Raises:
        UnknownWorker: there is no such worker; the message lists the known ones.
        PeerLost: the worker is gone.
        NotInitialized: before `init_rpc` or after `shutdown`.
    """
    agent = current_agent()
    if worker_name is None:
        return agent.me.info
    agent.executor.collecting.refuse("get_worker_info")
    return agent.directory.resolve(worker_name).worker.info


@breaks_graphs
def cancelled() -> bool:
    """Return whether no caller waits any more for the call that is being served here.

    Inside a function that was called remotely, the result is True when the caller has cancelled the
    call, has run out of time, or is gone. A function that runs long should ask now and then, and
    end. Elsewhere the result is False.
    """
    context = current_context()
    return context is not None and context.served is not None and context.served.cancelled


@breaks_graphs
def rpc_sync(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retry: int | Retry | None = None,
) -> Any:
    """Run a function on a worker and return its result.

    Args:
        to: name, id or `WorkerInfo` of a worker; may be this one.
        func: anything callable. Importable objects go by name: functions, classes, methods,
            operators such as `torch.add`, TorchScript functions. Lambdas and closures go by value.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: seconds, for all attempts together; 0 for no limit.
        retry: for a function that may run more than once: how often the call is made again if the
            worker is lost meanwhile or, where workers come and go, is not there. Each repetition is
            logged, and the last error says how many there were. An exception of the function is
            never a reason to repeat the call. Not meant for calls inside an autograd context.

    Raises:
        The exception that the function raised, with the remote traceback as its cause
            (`RemoteError` if it can't be rebuilt here).
        RpcTimeout: no result in time. The function may have run, or may still be running.
        PeerLost: the worker died or left.
        SerializationError: an argument or the result can't be sent; the message names it.
        FunctionNotFound: the worker has no such function.
        UnknownWorker, NotInitialized, TypeError: the call makes no sense.
    """
    try:
        seconds = check_call(func, args, kwargs, timeout)
        if retry is not None:
            agent = current_agent()
            made = partial(agent.call, to, func, args or (), kwargs)
            attempts = Attempts.of_call(agent, func, to, retry, seconds)
            return retrying.call(attempts, made)
        if is_profiler_enabled():
            call = to, func, args or (), kwargs, seconds
            return profiling.call(current_agent(), None, call)
        return current_agent().call(to, func, args or (), kwargs, seconds)
    except BaseException as error:
        hide_own_frames(error)
        raise


@breaks_graphs
def rpc_async(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retry: int | Retry | None = None,
) -> Future[Any]:
    """Run a function as `rpc_sync` does, but return a future at once.

    The future is a `torch.futures.Future` that can also be awaited. Errors of the call end up in
    the future; only errors of the arguments are raised here. The arguments' memory may be changed
    as soon as `rpc_async` returns, but with `retry` only when the future is done.
    """
    try:
        seconds = check_call(func, args, kwargs, timeout)
        if retry is not None:
            agent = current_agent()
            made = partial(agent.call_async, to, func, args or (), kwargs)
            attempts = Attempts.of_call(agent, func, to, retry, seconds)
            return retrying.call_async(agent, attempts, made, sys._getframe(1))
        if is_profiler_enabled():
            call = to, func, args or (), kwargs, seconds
            return profiling.call_async(current_agent(), None, call, sys._getframe(1))
        return current_agent().call_async(to, func, args or (), kwargs, seconds, sys._getframe(1))
    except BaseException as error:
        hide_own_frames(error)
        raise


@breaks_graphs
def remote(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    name: str | None = None,
    concurrency: int | None = None,
) -> RRef[Any]:
    """Run a function on a worker, leave the result there, and return a reference to it at once.

    If the function raises an exception, every use of the reference raises it. `timeout` bounds the
    making of the reference, not the function: if the worker has not accepted the call in time,
    using the reference raises RpcTimeout. If there is no such worker, `remote` itself raises
    UnknownWorker in a group of fixed size; where workers come and go, using the reference raises
    it. `kill` cancels the call if it is still making the object.

    Args:
        to, func, args, kwargs: as of `rpc_sync`.
        timeout: seconds; see above.
        name: a name by which every worker finds the object with `get_object`. If another object has
            the name, using the reference raises DuplicateName; if a worker does not say in time
            whether it has such an object, RpcTimeout. The name is free again when the object is
            dropped or killed or its worker is gone.
        concurrency: how many calls of the object's methods run at once; None: any number. Further
            calls wait, without a thread, in the order in which they arrive. A call whose method
            returns a future (`async_execution`) counts until the future is done. A call that a
            running method makes of its own object, directly or through other workers, runs at once.

    Raises:
        ValueError, TypeError: `concurrency` is not a positive whole number; another argument makes
            no sense.
    """
    try:
        seconds = check_call(func, args, kwargs, timeout)
        at_once = 0 if concurrency is None else check_concurrency(concurrency)
        agent = current_agent()
        if name is not None:
            func, args = named(name, func, args or (), kwargs)
            kwargs = None
        if is_profiler_enabled():
            call = to, func, args or (), kwargs, seconds
            return RRef.of(profiling.remote(agent, None, call, at_once))
        return RRef.of(agent.remote(to, func, args or (), kwargs, seconds, at_once))
    except BaseException as error:
        hide_own_frames(error)
        raise
