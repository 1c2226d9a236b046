"""Differences between farcall and torch.distributed.rpc, on which programs may rely.

The errors of remote functions are made anew, with a text as their only argument; a callee prints
them. A future fails those that wait for it and others as soon as it has failed. An error of a
callback becomes a RuntimeError. References made by `remote` with a timeout are of no use when the
function did not end in time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import get_gradient_edge

from farcall import torch_internals as internals
from farcall.compat.rpc.internal import _internal_rpc_pickler
from farcall.errors import CallError, FarcallError, InvalidResult, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.rref import RRef, type_of
from farcall.runtime.advice import Advice
from farcall.runtime.calls.future import Future
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, seconds_or_default
from farcall.runtime.quirks import Quirks
from farcall.serde.exceptions import (
    get_attribute,
    message_of,
    repr_of,
    set_attribute,
    set_cause,
)
from farcall.serde.tracebacks import cause_of, text_of, traceback_of_exception

_OUR_MARK, _TORCHS_MARK = "@farcall.functions.async_execution", "@rpc.async_function"


def translate(error: BaseException, where: WorkerInfo) -> BaseException:
    """Return what torch's call would raise, from what this worker has answered with."""
    if issubclass(type(error), InvalidResult):
        set_attribute(error, "args", (message_of(error).replace(_OUR_MARK, _TORCHS_MARK),))
    if issubclass(type(error), FarcallError):
        return error
    if issubclass(type(error), torch.jit.Error):
        return RuntimeError(message_of(error))
    trace = get_attribute(error, "remote_traceback") or text_of(error)
    text = f"On {where}:\n{repr_of(error)}\n{trace}"
    return recreated(error, _unescaped(text))


def show(error: BaseException, here: WorkerInfo) -> None:
    """Print what a function has raised here."""
    if issubclass(type(error), Exception):
        print(f"On {here}:\n{repr_of(error)}\n{text_of(error)}", file=sys.stderr)


def _unescaped(text: str) -> str:
    """Return the text with line ends where the repr of a message escapes them, as in torch."""
    try:
        return text.encode("ascii").decode("unicode_escape")
    except UnicodeError:
        return text


def recreated(error: BaseException, text: str) -> BaseException:
    """Return an exception of the same type that says this."""
    try:
        made = type(error)(text)
        if not issubclass(type(made), BaseException):
            raise TypeError(f"calling the type of the exception made a {type(made).__name__}")
    except BaseException as failure:
        made = RuntimeError(
            f"Failed to create original exception type. Error msg was {message_of(failure)}"
            f" Original exception on remote side was {text}"
        )
    set_cause(made, cause_of(error))
    set_attribute(made, "remote_error", error)
    for name in ("remote_worker", "remote_traceback"):
        set_attribute(made, name, get_attribute(error, name))
    return BaseException.with_traceback(made, traceback_of_exception(error))


def then(self: Future[Any], callback: Callable[[Any], Any]) -> Future[Any]:
    """`Future.then`; an error of the callback becomes a RuntimeError."""

    def call(future: Any) -> Any:
        try:
            return callback(future)
        except RuntimeError:
            raise
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {message_of(error)}") from error

    return original_then(self, call if callable(callback) else callback)


original_then = Future.then
original_collect_all = internals.collect_all


def collect_all(futures: Sequence[Any]) -> Any:
    """`torch.futures.collect_all`; fails as soon as one of them has failed."""
    if not any(isinstance(future, Future) for future in futures):
        return original_collect_all(list(futures))
    result: Future[Any] = Future()
    lock = threading.Lock()
    left = len(futures)

    def on_done(future: Any) -> None:
        nonlocal left
        try:
            future.value()
            error = None
        except BaseException as failure:
            error = failure
        with lock:
            was_over, left = left <= 0, 0 if error is not None else left - 1
            is_over = left <= 0
        if was_over or not is_over:
            return
        if error is None:
            result.set_result(list(futures))
        else:
            result.set_exception(error)

    for future in futures:
        future.add_done_callback(on_done)
    return result


# Hooks of the nodes that accumulate gradients of leaves: `node.register_hook`. Distributed passes
# don't run these nodes. Finding out whether a node has hooks takes microseconds for each leaf, so
# that is done only if any node was ever given one.

_any_node_has_hooks = False
original_register_hook = internals.register_hook


def register_hook(hooks: Any, hook: Any) -> Any:
    """Add a hook to a node, in the form that torch asks for."""
    global _any_node_has_hooks  # noqa: PLW0603
    _any_node_has_hooks = True
    return original_register_hook(hooks, hook)


def call_leaf_hooks(gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Call the hooks of these leaves with their gradients. Their return values are not used."""
    if _any_node_has_hooks:
        for leaf, gradient in gradients:
            for hook in _hooks_of(leaf):
                hook((), (gradient,))


def _hooks_of(leaf: torch.Tensor) -> list[Callable[..., Any]]:
    # Only the code that adds a hook is given the table of them.
    handle = get_gradient_edge(leaf).node.register_hook(lambda *_: None)
    table = handle.hooks_dict_ref()
    handle.remove()
    return [] if table is None else list(table.values())


# References.

_until: WeakKeyDictionary[RRef[Any], float] = WeakKeyDictionary()  # `time.monotonic()` seconds
_useless: WeakKeyDictionary[RRef[Any], str] = WeakKeyDictionary()  # and why


def _check_use(rref: RRef[Any]) -> None:
    if rref in _useless:
        raise RpcTimeout(_useless[rref])
    rref._handle.references.check_sendable(rref._handle)


def note_timeout(rref: RRef[Any], timeout: float) -> RRef[Any]:
    """Note that `remote` made a reference with this timeout, in seconds; return the reference."""
    if timeout not in (UNSET_RPC_TIMEOUT, 0):
        _until[rref] = time.monotonic() + timeout
    return rref


def get_future(self: RRef[Any]) -> Future[Any]:
    """`RRef._get_future`: of when the value is made. After a timeout the reference is of no use."""
    handle = self._handle
    agent = handle.references.agent
    until = _until.get(self)
    seconds = None if until is None else max(0.001, until - time.monotonic())
    made = agent.call_async(handle.to, type_of, (handle,), None, seconds)
    future: Future[Any] = Future()

    def on_made(_: Any) -> None:
        try:
            made.value()
        except RpcTimeout as error:
            _useless[self] = f"RRef creation via rpc.remote() timed out: {error}"
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    made.add_done_callback(on_made)
    return future


def serialize(self: RRef[Any]) -> Any:
    """`RRef._serialize`: raises if it may not be sent. It goes by calls of farcall's only."""
    handle = self._handle
    if handle.references.agent.status.is_closed:
        raise RuntimeError(f"{self!r}: Cannot call fork an UserRRef after deletion.")
    _check_use(self)
    if handle.is_owner and self._slot.is_ready:
        try:
            self._slot.get()
        except CallError:
            raise
        except BaseException:
            pass  # what the function raised is raised where the value is used
    return handle


def deserialize(data: Any) -> RRef[Any]:
    """`RRef._deserialize`."""
    return RRef.of(data)


def to_here(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """`RRef.to_here`; also its owner does not get the value of one that is of no use."""
    if self._handle.references.agent.status.is_closed:
        raise RuntimeError(f"{self!r}: Cannot call to_here() on it after deletion.")
    _check_use(self)
    if not self._handle.is_owner:
        return original_to_here(self, timeout)
    return _own_value(self, lambda: original_to_here(self, timeout))


def local_value(self: RRef[Any]) -> Any:
    """`RRef.local_value`; an error of the function is raised as for other workers."""
    return _own_value(self, lambda: original_local_value(self))


def _own_value(rref: RRef[Any], get: Callable[[], Any]) -> Any:
    agent = rref._handle.references.agent
    try:
        return get()
    except Exception as error:
        raised = translate(error, agent.me.info)
        if raised is error:
            raise
        raise raised from cause_of(raised)


original_to_here = RRef.to_here
original_local_value = RRef.local_value


class _Remote:
    """The result of `rref.remote()`: a method call waits for the value first, as torch's does."""

    def __init__(self, rref: RRef[Any], timeout: float) -> None:
        self.__rref = rref
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., RRef[Any]]:
        def call(*args: Any, **kwargs: Any) -> RRef[Any]:
            getattr(self.__rref._get_type(self.__timeout), name)
            made = getattr(original_remote(self.__rref, self.__timeout), name)(*args, **kwargs)
            return note_timeout(made, self.__timeout)

        return call


original_remote = RRef.remote


def remote(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """`RRef.remote`."""
    seconds_or_default(timeout)
    return _Remote(self, timeout)


LIKE_TORCH = Quirks(
    translate,
    show,
    call_leaf_hooks,
    inherits_deadlines=False,
    # The table itself: RemoteModule adds to it when it is imported, which may be later.
    reducers=internals.class_reducer_dict(_internal_rpc_pickler),
    advice=Advice(()),
)


def install(swap: Any) -> None:
    """Change farcall's own classes, and what torch waits with for several futures."""
    swap.attribute(Future, "then", then)
    swap.attribute(*internals.place_of("collect_all"), collect_all)
    swap.attribute(*internals.place_of("register_hook"), staticmethod(register_hook))
    for name, value in (
        (internals.attribute_of("get_future"), get_future),
        (internals.attribute_of("serialize"), serialize),
        (internals.attribute_of("deserialize"), staticmethod(deserialize)),
        ("remote", remote),
        ("to_here", to_here),
        ("local_value", local_value),
    ):
        swap.attribute(RRef, name, value)
