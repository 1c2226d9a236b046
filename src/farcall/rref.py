"""References to values on other workers, and calls of their methods."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar

import torch

from farcall.errors import Cancelled, RpcTimeout
from farcall.ids import WorkerInfo, worker_info
from farcall.runtime.agent import Agent
from farcall.runtime.calls import methods, profiling
from farcall.runtime.calls.call_names import own_handler
from farcall.runtime.calls.deferred import Deferred, result_of
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.graph_breaks import methods_break_graphs
from farcall.runtime.calls.limits import Limit
from farcall.runtime.calls.policy import method_of
from farcall.runtime.context import CallBeingServed, allowed_now, current_context, waiting
from farcall.runtime.current import current_agent
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, ran_too_long, seconds_or_default
from farcall.runtime.references.handles import RefHandle
from farcall.runtime.references.sought import SOUGHT
from farcall.runtime.references.values import ValueSlot
from farcall.serde import StoredError, hide_own_frames, own_type
from farcall.torch_internals import is_profiler_enabled

T = TypeVar("T")


@methods_break_graphs
class RRef(Generic[T]):
    """A reference to a value that lives on one worker, its owner.

    `RRef(value)` makes this worker the owner of `value`; `rpc.remote(...)` makes another worker the
    owner of a result. References may be passed in any argument or result of a call, also inside
    other objects; outside of calls they can't be pickled. The owner keeps the value while any
    worker has a reference to it, or one is on its way.

    Timeouts are in seconds; 0 means none, and -1 the default given to `init_rpc`. Thread-safe.
    """

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, value: T, type_hint: Any = None) -> None:
        """Make this worker the owner of `value`.

        Args:
            value: anything; it need not be picklable unless another worker calls `to_here`.
            type_hint: accepted as in PyTorch, where TorchScript uses it.

        Raises:
            NotInitialized: before `init_rpc` or after `shutdown`.
        """
        self._handle, slot = current_agent().references.own()
        slot.set(value)

    @classmethod
    def of(cls, handle: RefHandle) -> Self:
        """Return the reference for a handle of an agent."""
        rref = cls.__new__(cls)
        rref._handle = handle
        return rref

    def __reduce__(self) -> tuple[Callable[..., RRef[Any]], tuple[RefHandle]]:
        return rebuild_reference, (self._handle,)

    def __repr__(self) -> str:
        handle: RefHandle | None = getattr(self, "_handle", None)
        if handle is None:
            return "<RRef that was not made>"
        kind = "OwnerRRef" if handle.is_owner else "UserRRef"
        reference = handle.reference
        identity = f"RRefId(created_on={reference.minted_by:x}, local_id={reference.number.hex()})"
        state = handle.references.described_state(handle)
        return f"{kind}({identity}, owner={handle.to!r}, {state})"

    if not TYPE_CHECKING:  # type checkers know the attributes of a reference
        __getattr__ = methods.refuse_attribute

    _follows = False  # whether the reference leads to another object when its own is made again

    @property
    def _agent(self) -> Agent:
        agent: Agent = self._handle.references.agent
        return agent

    @property
    def _slot(self) -> ValueSlot:
        handle = self._handle
        return handle.references.value_of(handle)

    def _present(self, _: float | None = None) -> RRef[T]:
        """Return the reference to the object as it is now. See `FollowingRRef`."""
        return self

    def _when_present(self, call: Callable[[RRef[T]], Future[Any]]) -> Future[Any]:
        """Call with the reference to the object as it is now, without waiting for the object."""
        return call(self)

    # Where it lives.

    def is_owner(self) -> bool:
        """Return whether the value lives on this worker."""
        return self._handle.is_owner

    def owner(self) -> WorkerInfo:
        """Return the worker where the value lives. In an open group, wait until it is found.

        Raises:
            UnknownWorker: there is no worker of that name or id.
            RpcTimeout: the worker was not found within the default timeout.
        """
        handle = self._handle
        if handle.owner == SOUGHT:
            _wait_for_owner(handle, self._agent)
        reference = handle.reference
        return worker_info(reference.owner_name, reference.owner_id)

    def owner_name(self) -> str:
        """Return the name of the owner. Waits as `owner` does if only its id is known."""
        return self._handle.reference.owner_name or self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has confirmed that it knows of this worker's reference."""
        return self._handle.references.is_confirmed(self._handle)

    # The value.

    def local_value(self) -> T:
        """Return the value itself, on its owner. Waits for the function that makes it.

        Raises:
            InvalidReference: this worker is not the owner.
            RpcTimeout: the value was not made by the deadline of the call that is being served.
            Cancelled: the caller of the call that is being served gave up, or was lost.
            BaseException: what the function that was to make the value raised.
        """
        try:
            return _value(self._slot)  # type: ignore[no-any-return]
        except BaseException as error:
            hide_own_frames(error)
            raise

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value itself on its owner, elsewhere a copy. Waits until it is made.

        Args:
            timeout: seconds; 0 for no limit.

        Raises:
            RpcTimeout: the value was not here in time.
            Cancelled: on its owner, as of `local_value`.
            OwnerDied: the owner is gone.
            PeerLost: the owner was lost meanwhile.
            BaseException: what the function that was to make the value raised.
        """
        try:
            seconds = seconds_or_default(timeout)
            if self._handle.is_owner:
                return _value(self._slot, self._agent.limits.of_call(seconds))  # type: ignore[no-any-return]
            return self._agent.call(self._handle.to, fetch, (self._handle,), None, seconds)  # type: ignore[no-any-return]
        except BaseException as error:
            hide_own_frames(error)
            raise

    # Calls of its methods.

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Call methods on the owner: `rref.rpc_sync().method(*args)` returns the result."""
        seconds = None if timeout is UNSET_RPC_TIMEOUT else seconds_or_default(timeout)
        handle = self._handle
        return MethodProxy(
            "rpc_sync", handle, handle.references.agent.call, profiling.call, seconds
        )

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Call methods on the owner: `rref.rpc_async().method(*args)` returns a future."""
        call = self._agent.call_async
        seconds = seconds_or_default(timeout)
        return MethodProxy("rpc_async", self._handle, call, _record_async, seconds)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Call methods on the owner: `rref.remote().method(*args)` returns a new RRef there."""
        call = _remote(self._agent)
        seconds = seconds_or_default(timeout)
        return MethodProxy("remote", self._handle, call, _record_remote, seconds)

    # Gradients.

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, which must be a tensor of one element.

        Args:
            dist_autograd_ctx_id: the autograd context in which the value was computed: its owner
                begins a distributed pass, see `farcall.autograd.backward`. With -1, on the owner
                only, this is `Tensor.backward`.
            retain_graph: keep the graph for another pass.

        Raises:
            RuntimeError: the value is no such tensor; no such context; no context, and this worker
                is not the owner.
            BaseException: what `farcall.autograd.backward` raises.
        """
        handle = self._handle
        if dist_autograd_ctx_id == -1 and not handle.is_owner:
            raise RuntimeError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the value lives on "
                f"worker {handle.to!r}, this is {handle.references.me.name!r}"
            )
        try:
            if handle.is_owner:
                _backward(self._slot, self._agent, dist_autograd_ctx_id, retain_graph)
            else:
                call = (handle, dist_autograd_ctx_id, retain_graph)
                self._agent.call(handle.to, run_backward, call)
        except BaseException as error:
            hide_own_frames(error)
            raise

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Type of the value, or a future of it if not `blocking`; named as in PyTorch."""
        seconds = seconds_or_default(timeout)
        call = self._agent.call if blocking else self._agent.call_async
        return call(self._handle.to, type_of, (self._handle,), None, seconds)


def _wait_for_owner(handle: RefHandle, agent: Agent) -> None:
    agent.executor.collecting.refuse("RRef.owner")
    deadline, seconds, inherited = agent.limits.of_call(None)
    try:
        handle.references.wait_until_sent((handle,), deadline)
    except TimeoutError:
        raise RpcTimeout(
            f"{ran_too_long(seconds)}: it is not known yet where worker {handle.to!r} is"
            f"{agent.limits.how_to_raise(seconds, inherited)}"
        ) from None
    handle.references.travelling((handle,))


def rebuild_reference(handle: RefHandle) -> RRef[Any]:
    """Names itself in pickles."""
    return RRef.of(handle)


own_type(RRef, lambda rref: rref._handle, RefHandle, RRef.of)


class _Call(Protocol):
    def __call__(
        self,
        to: str | int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: None,
        timeout: float | None,
        /,
    ) -> Any: ...


def _remote(agent: Agent) -> _Call:
    def remote(*call: Any) -> RRef[Any]:
        return RRef.of(agent.remote(*call))

    return remote


def _record_async(agent: Agent, name: str | None, call: profiling.Call) -> Future[Any]:
    return profiling.call_async(agent, name, call, sys._getframe(2))


def _record_remote(agent: Agent, name: str | None, call: profiling.Call) -> RRef[Any]:
    return RRef.of(profiling.remote(agent, name, call))


_Record = Callable[[Agent, str | None, profiling.Call], Any]  # the same while a profiler runs


@methods_break_graphs
class MethodProxy:
    """Attributes are the methods of a remote value; its own names are mangled out of their way."""

    __slots__ = ("__call", "__handle", "__record", "__timeout", "__way")

    def __init__(
        self, way: str, handle: RefHandle, call: _Call, record: _Record, timeout: float | None
    ) -> None:
        self.__way = way
        self.__handle = handle
        self.__call = call
        self.__record = record
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name[:2] == "__":
            methods.check_is_for_the_owner(name)
        return methods.RemoteMethod(self.__invoke, name)

    def __repr__(self) -> str:
        return f"<rref.{self.__way}() of {RRef.of(self.__handle)!r}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a call proxy (rref.{self.__way}()) can't be sent or pickled: send the reference, and "
            f"call its {self.__way}() there"
        )

    def __invoke(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        handle = self.__handle
        try:
            if self.__way == "rpc_async":  # errors of the reference are raised here
                handle.references.check_usable(handle)
            owner = handle.reference.owner_name or handle.to
            call = (handle, method, args, kwargs)
            if is_profiler_enabled():
                made = owner, call_method, call, None, self.__timeout
                return self.__record(handle.references.agent, method, made)
            return self.__call(owner, call_method, call, None, self.__timeout)
        except BaseException as error:
            hide_own_frames(error)
            raise


def call_named(
    proxy: MethodProxy, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a method of a remote value, also one whose name the proxy has itself."""
    return proxy._MethodProxy__invoke(name, *args, **kwargs)


# Functions that run on the owner, called with a reference: each gets the slot of its value.


def _value(slot: ValueSlot, limit: Limit | None = None) -> Any:
    """Return the value; wait as long as allowed, and as a caller waits for the call served here.

    Args:
        limit: what `CallLimits.of_call` gives; None for the deadline of the call served here.
    """
    if not slot.is_ready:
        context = current_context()
        served = None
        if context is not None and current_agent().limits.are_inherited:
            served = context.served
        if limit is None:
            limit = (math.inf, 0.0, None) if served is None else served.limit()
        _wait(slot, limit, served)
    return slot.get()


def _wait(slot: ValueSlot, limit: Limit, served: CallBeingServed | None) -> None:
    deadline, seconds, inherited = limit
    current_agent().executor.collecting.refuse("the value of an RRef that is not made yet")
    done = threading.Event()
    stopping = contextlib.nullcontext() if served is None else served.stopped_by(done.set)
    with waiting(), stopping:
        if slot.wait(deadline, done):
            return
    if done.is_set():
        raise Cancelled(
            "no caller waits any more for the call that waits here for the value of a reference: "
            "its caller gave up, or was lost"
        )
    agent = current_agent()
    raise RpcTimeout(
        f"{ran_too_long(seconds)}: the value of this reference is not made yet"
        f"{agent.shortage.describe()}{agent.limits.how_to_raise(seconds, inherited)}"
    )


@own_handler("to_here", result="the value of the reference, of type {},", on_reference=True)
def fetch(slot: ValueSlot) -> Any:
    """Handler of `to_here`."""
    return _when_made(slot, ValueSlot.get)


@own_handler("the type of a remote value", on_reference=True)
def type_of(slot: ValueSlot) -> Any:
    """Handler of `_get_type`."""
    return _when_made(slot, lambda slot: type(slot.get()))


def _when_made(slot: ValueSlot, read: Callable[[ValueSlot], Any]) -> Any:
    """Read a value now, or let the call wait for it without a thread."""
    if slot.is_ready:
        return read(slot)
    future: Future[Any] = Future()

    def made(slot: ValueSlot) -> None:
        try:
            future.set_result(read(slot))
            return
        except BaseException as error:
            failure = StoredError(error)
        future.set_exception(failure.error())  # not in the handler, as in `ServerCall.run`

    slot.when_ready(made)
    return Deferred(future, partial(slot.remove_callback, made))


@own_handler("the backward pass of a remote value", on_reference=True)
def run_backward(slot: ValueSlot, context: int, retain_graph: bool) -> None:
    """Handler of `RRef.backward`."""
    _backward(slot, current_agent(), context, retain_graph)


def _backward(slot: ValueSlot, agent: Agent, context: int, retain_graph: bool) -> None:
    value = _value(slot)
    if not isinstance(value, torch.Tensor):
        found = type(value).__name__
        raise RuntimeError(f"RRef should contain a tensor for .backward(), not {found}")
    if context == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        agent.gradients.backward(context, [value], retain_graph=retain_graph)


def awaited(slot: ValueSlot) -> Any:
    """Return the value, waiting as long as the caller of the call served here does."""
    context = current_context()
    served = None if context is None else context.served
    return _value(slot, None if served is None else served.limit())


@own_handler(
    "a method of a remote value",
    of_method="method {!r} of a remote value",
    users_arguments=2,
    on_reference=True,
)
def call_method(slot: ValueSlot, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handler of the call proxies."""
    value = slot.get() if slot.is_ready else awaited(slot)
    only = allowed_now()
    method = getattr(value, name) if only is None else method_of(only, value, name)
    if not callable(method):
        raise methods.not_a_method(method, value, name)
    return result_of(method, method(*args, **kwargs))
