"""The names of `torch.distributed.rpc.api`, with the private ones that programs lean on."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler
from torch.distributed.rpc.api import AllGatherStates

from farcall import rpc as farcall_rpc
from farcall import torch_internals as internals
from farcall.compat.rpc.agents import RpcAgent, TensorPipeAgent
from farcall.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from farcall.compat.rpc.internal import PythonUDF, RPCExecMode, _internal_rpc_pickler
from farcall.compat.rpc.quirks import note_timeout, serialize
from farcall.compat.rpc.scripts import check_arguments
from farcall.errors import RpcTimeout
from farcall.ids import WorkerInfo
from farcall.log import get_logger
from farcall.rref import RRef
from farcall.runtime.calls import profiling
from farcall.runtime.calls.future import Future
from farcall.runtime.context import current_context
from farcall.runtime.current import current_agent, default_agent
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.timeouts import ran_too_long, seconds_or_default, validate_timeout

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Call = tuple[Callable[..., Any], Sequence[Any] | None, Mapping[str, Any] | None]

PyRRef = RRef
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_ALL_WORKER_NAMES: set[str] = set()

# The agent of this process, as torch.distributed.rpc shows it. Of another make than farcall's if
# a backend of the user's own was registered.
_shown: Any = None


# The agent.


def _is_current_rpc_agent_set() -> bool:
    return _shown is not None or default_agent() is not None


def _get_current_rpc_agent() -> Any:
    if _shown is not None and not isinstance(_shown, RpcAgent):
        return _shown
    agent = current_agent()
    if _shown is not None and _shown.agent is agent:
        return _shown
    return TensorPipeAgent(agent, RpcBackendOptions(), is_static_group=True)


def _set_and_start_rpc_agent(agent: Any) -> None:
    global _shown  # noqa: PLW0603
    _shown = agent


def _reset_current_rpc_agent() -> None:
    global _shown  # noqa: PLW0603
    _shown = None


def _init_rpc_states(agent: Any) -> None:
    _ALL_WORKER_NAMES.clear()
    _ALL_WORKER_NAMES.update(info.name for info in agent.get_worker_infos())
    _set_and_start_rpc_agent(agent)


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        # A function may be called before the agent that serves the call is this process's.
        if not _is_current_rpc_agent_set() and current_context() is None:
            raise RuntimeError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return func(*args, **kwargs)

    return wrapper


def get_rpc_timeout() -> float:
    """Seconds that a call may take by default; 0 for no limit."""
    return current_agent().status.rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    current_agent().status.rpc_timeout = validate_timeout(seconds)


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and id of a worker, or of this one."""
    info: WorkerInfo = _get_current_rpc_agent().get_worker_info(worker_name)
    return info


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


# Calls.


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pickle calls of this process with another pickler inside the block."""
    global _default_pickler  # noqa: PLW0603
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _call(func: Any, args: Any, kwargs: Any) -> Call:
    """Return a call, as farcall is to make it. Raises on wrong arguments of a script."""
    if isinstance(func, torch.jit.ScriptFunction):
        check_arguments(func, args or (), kwargs or {})
    if _default_pickler is _internal_rpc_pickler or not callable(func):
        return func, args, kwargs
    return run_pickled, _default_pickler.serialize(PythonUDF(func, args or (), kwargs or {})), None


def run_pickled(pickled: bytes, tensors: list[torch.Tensor]) -> Any:
    """Runs on the callee what a pickler of the caller's own has pickled."""
    call = _internal_rpc_pickler.deserialize(pickled, tensors)  # type: ignore[no-untyped-call]
    if isinstance(call, AttributeError):
        raise call
    return call.func(*call.args, **call.kwargs)


@_require_initialized
def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """See `farcall.rpc.rpc_sync`."""
    return farcall_rpc.rpc_sync(to, *_call(func, args, kwargs), timeout)


@_require_initialized
def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """See `farcall.rpc.rpc_async`. A reference that is of no use is an error at once."""
    for arg in args or ():
        if isinstance(arg, RRef):
            serialize(arg)
    is_recorded = internals.profiler_enabled()
    make = _rpc_async_recorded if is_recorded else farcall_rpc.rpc_async
    future = make(to, *_call(func, args, kwargs), timeout)
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


def _rpc_async_recorded(to: Any, *call: Any) -> torch.futures.Future[Any]:
    """Make the call, also recorded for the old profiler, torch.autograd.profiler_legacy."""
    if internals.is_profiler_enabled():
        return farcall_rpc.rpc_async(to, *call)
    function, args, kwargs, timeout = call
    made = (to, function, args or (), kwargs, seconds_or_default(timeout))
    # That profiler sees no event which ends in another thread.
    with profiler.record_function(profiling.event_name(current_agent(), "async", None, made)):
        return farcall_rpc.rpc_async(to, *call)


def _invoke_rpc(
    to: Any,
    func: Callable[..., Any],
    rpc_type: RPCExecMode,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """`rpc_async`. The mode is for profilers only, and noted by farcall itself."""
    return rpc_async(to, func, args, kwargs, rpc_timeout)


@_require_initialized
def remote(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """See `farcall.rpc.remote`."""
    return note_timeout(farcall_rpc.remote(to, *_call(func, args, kwargs), timeout), timeout)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, when the block ends, for all futures that `rpc_async` gave in it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# All workers together.


@_require_initialized
def _all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the value that each worker passes, by name, when all of them have called this.

    See `farcall.rpc.all_gather`.

    Args:
        timeout: seconds; unset: late workers are waited for without limit, and once all have come
            the exchange has the agent's limit of a call.

    Raises:
        RuntimeError: some did not come, or the exchange was not done, in time; or one died.
    """
    names = sorted(worker_names or _ALL_WORKER_NAMES)
    seconds = timeout
    try:
        if timeout == UNSET_RPC_TIMEOUT:
            farcall_rpc.barrier(names, key="_all_gather", timeout=0)
            seconds = get_rpc_timeout()
        return farcall_rpc.all_gather(obj, names, key="_all_gather", timeout=seconds)
    except RpcTimeout as error:
        raise RpcTimeout(
            f"{ran_too_long(seconds)}: some of {names} timed out in _all_gather after "
            f"{seconds:.2f} seconds. {error}"
        ) from error


@_require_initialized
def _barrier(worker_names: Any) -> None:
    """Returns when all of these workers have called this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when all workers have called this."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# The end. farcall's `shutdown` itself waits for all workers but the dead, and does not need this;
# a function that a program has put in its place is called, as by torch.
_wait_of_our_own = _wait_all_workers


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 0.0) -> None:
    """Do nothing: references end with their agent, and `shutdown` waits for calls under way."""


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """Do nothing: references end with their agent."""


def _cleanup_python_rpc_handler() -> None:
    """Do nothing: there is no handler in C++."""


def _finalize_shutdown() -> None:
    """End the agent of this process, without waiting for others."""
    shutdown(graceful=False)


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """See `farcall.rpc.shutdown`."""
    agent = _get_current_rpc_agent()
    if not isinstance(agent, RpcAgent):
        agent.shutdown()
        _reset_current_rpc_agent()
        return
    try:
        if graceful and _wait_all_workers is not _wait_of_our_own:
            try:
                _wait_all_workers(timeout)
            except BaseException:
                farcall_rpc.shutdown(graceful=False)
                raise
        if graceful:
            _delete_all_user_and_unforked_owner_rrefs()
        farcall_rpc.shutdown(graceful, timeout)
    finally:
        _reset_current_rpc_agent()


# Types of references' values.

_types: WeakKeyDictionary[RRef[Any], torch.futures.Future[type]] = WeakKeyDictionary()


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    kind = type(rref.local_value())
    if blocking:
        return kind
    future: Future[type] = Future()
    future.set_result(kind)
    return future


def _rref_typeof_on_user(
    rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
) -> Any:
    future = rpc_async(rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout)
    return future.wait() if blocking else future


def get_type(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """`RRef._get_type`. The owner is asked once."""
    if self.is_owner():
        return _rref_typeof_on_owner(self, blocking)
    future = _types.get(self)
    if future is None:
        future = _types[self] = _rref_typeof_on_user(self, timeout, blocking=False)

        def discard_failure(done: torch.futures.Future[type]) -> None:
            try:
                done.value()
            except BaseException:
                _types.pop(self, None)

        future.add_done_callback(discard_failure)
    return future.wait() if blocking else future
