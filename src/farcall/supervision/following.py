"""References that follow a supervised object when it is made again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import torch

from farcall.errors import UnknownObject
from farcall.objects import ask_all
from farcall.protocol.standing import SupervisionState
from farcall.rref import MethodProxy, RRef, call_named
from farcall.runtime.agent import Agent
from farcall.runtime.calls import retrying
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.calls.graph_breaks import methods_break_graphs
from farcall.runtime.calls.retrying import Attempts, Retry
from farcall.runtime.current import current_agent
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, seconds_or_default
from farcall.runtime.references.handles import RefHandle
from farcall.serde import hide_own_frames, own_type
from farcall.supervision.handlers import state_of, supervisors_of

T = TypeVar("T")

ONCE = Retry(0)


@methods_break_graphs
class FollowingRRef(RRef[T]):
    """A reference to a supervised object, which leads to the new one when it is made again.

    Uses while the object is made again wait for that. A call that is in flight when the
    owner dies ends in `PeerLost`, unless `retry=` says that it may be repeated. The reference keeps
    no object: that is the supervisor's. It may be passed in arguments and results. Thread-safe.
    """

    __slots__ = ("_follower", "_name")

    _name: str
    _follower: Agent
    _follows = True

    @classmethod
    def to(cls, agent: Agent, name: str) -> Self:
        """Return a reference to the supervised object of that name."""
        made = cls.__new__(cls)
        made._follower, made._name = agent, name
        return made

    @classmethod
    def here(cls, name: str) -> Self:
        """Return the reference as it arrives: of the agent that the code runs for."""
        return cls.to(current_agent(), name)

    def __reduce__(self) -> Any:
        return FollowingRRef.here, (self._name,)

    def __repr__(self) -> str:
        return f"FollowingRRef({self._name!r})"

    @property
    def _agent(self) -> Agent:
        return self._follower

    @property
    def _handle(self) -> RefHandle:  # type: ignore[override]
        return self._present(None)._handle

    def _present(self, seconds: float | None = None) -> RRef[T]:
        """Return the reference to the object as it is now; wait while it is made again.

        Raises:
            RpcTimeout: that takes longer than these seconds; None for the default.
            OwnerDied: the object was given up.
            Cancelled: it was killed.
            UnknownObject: no worker knows of it.
        """
        agent = self._follower
        supervisors = supervisors_of(agent)
        deadline, limit, _ = agent.limits.of_call(seconds)
        if supervisors.state_of(self._name) is None:
            learn(agent, self._name, deadline)
        found = supervisors.find(self._name)
        if found is None:
            found = supervisors.when_there(self._name, limit or float("inf")).wait()
        return found

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """See `RRef.to_here`."""
        present, left = self._present_in(timeout)
        return present.to_here(left)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """See `RRef.backward`."""
        self._present(None).backward(dist_autograd_ctx_id, retain_graph)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        present, left = self._present_in(timeout)
        return present._get_type(left, blocking)

    def rpc_sync(
        self, timeout: float = UNSET_RPC_TIMEOUT, *, retry: int | Retry | None = None
    ) -> Any:
        """See `RRef.rpc_sync`.

        Args:
            timeout: seconds; 0 for no limit.
            retry: how often a call is made again that a death ends; see `farcall.rpc.rpc_sync`.
        """
        if retry is None:
            return self._calls("rpc_sync", timeout)
        call = partial(self._call, Retry.of(retry), seconds_or_default(timeout))
        return _Calls("rpc_sync", self, call)

    def rpc_async(
        self, timeout: float = UNSET_RPC_TIMEOUT, *, retry: int | Retry | None = None
    ) -> Any:
        """See `RRef.rpc_async`, and `rpc_sync` for `retry`. Waits for nothing, as ever."""
        again = ONCE if retry is None else Retry.of(retry)
        call = partial(self._call_async, again, seconds_or_default(timeout))
        return _Calls("rpc_async", self, call)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """See `RRef.remote`."""
        return self._calls("remote", timeout)

    def _calls(self, way: str, timeout: float) -> _Calls:
        """Return a proxy each of whose calls is made of the object as it is then."""
        seconds_or_default(timeout)  # raises if it is no timeout

        def call(method: str, /, *args: Any, **kwargs: Any) -> Any:
            try:
                present, left = self._present_in(timeout)
                return call_named(getattr(present, way)(left), method, args, kwargs)
            except BaseException as error:
                hide_own_frames(error)
                raise

        return _Calls(way, self, call)

    def _present_in(self, timeout: float) -> tuple[RRef[T], float]:
        """Return the present reference, and the rest of a timeout after that."""
        began = time.monotonic()
        present = self._present(seconds_or_default(timeout))
        is_limited = timeout not in (0, UNSET_RPC_TIMEOUT)
        left = max(timeout - (time.monotonic() - began), 1e-3) if is_limited else timeout
        return present, left

    def _call(
        self, retry: Retry, seconds: float | None, method: str, /, *args: Any, **kwargs: Any
    ) -> Any:
        def make(left: float) -> Any:
            present, left = self._present_in(left)
            return call_named(present.rpc_sync(left), method, args, kwargs)

        try:
            attempts = Attempts(self._follower, self._what(method), retry, seconds)
            return retrying.call(attempts, make)
        except BaseException as error:
            hide_own_frames(error)
            raise

    def _call_async(
        self, retry: Retry, seconds: float | None, method: str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        def call(left: float, present: RRef[T]) -> Future[Any]:
            return call_named(present.rpc_async(left), method, args, kwargs)  # type: ignore[no-any-return]

        def make(left: float) -> Future[Any]:
            return self._when_there(left or float("inf"), partial(call, left))

        attempts = Attempts(self._follower, self._what(method), retry, seconds)
        return retrying.call_async(self._follower, attempts, make, sys._getframe(1))

    def _when_present(self, call: Callable[[RRef[T]], Future[Any]]) -> Future[Any]:
        _, limit, _ = self._follower.limits.of_call(None)
        return self._when_there(limit or float("inf"), call)

    def _when_there(self, limit: float, call: Callable[[RRef[T]], Future[Any]]) -> Future[Any]:
        supervisors = supervisors_of(self._follower)
        if supervisors.state_of(self._name) is None:
            learn(self._follower, self._name, time.monotonic() + limit)
        found = supervisors.find(self._name)
        if found is not None:
            return call(found)
        return _FollowingCall.of(supervisors.when_there(self._name, limit), call)

    def _what(self, method: str) -> str:
        return f"{method!r} of {self._name!r}"


# Strict workers take it by its name.
own_type(FollowingRRef, lambda made: made._name, str, FollowingRRef.here)


@methods_break_graphs
class _Calls(MethodProxy):
    """Attributes are the methods of a supervised object, as it is when they are called."""

    __slots__ = ("_MethodProxy__invoke", "__of")

    def __init__(self, way: str, of: FollowingRRef[Any], invoke: Callable[..., Any]) -> None:
        self._MethodProxy__way = way  # type: ignore[misc]  # a slot of the base
        self._MethodProxy__invoke = invoke
        self.__of = of

    def __repr__(self) -> str:
        return f"<rref.{self._MethodProxy__way}() of {self.__of!r}>"


class _FollowingCall(Future[Any]):
    """The future of a call that is made when another future is done."""

    @classmethod
    def of(cls, first: Future[T], make: Callable[[T], Future[Any]]) -> Future[Any]:
        chain = cls()

        def done(_: torch.futures.Future[T]) -> None:
            if chain.done():
                return  # it was cancelled
            try:
                chain.call = make(first.value())
            except Exception as error:
                complete_with(chain, error)
            else:
                chain.call.add_done_callback(chain._complete)
                if chain.cancelled():  # perhaps before the call could be found
                    chain.call.cancel()

        first.add_done_callback(done)
        return chain

    def _complete(self, call: torch.futures.Future[Any]) -> None:
        try:
            value = call.value()
        except BaseException as error:
            complete_with(self, error)
        else:
            if not self.done():
                self.set_result(value)


def learn(agent: Agent, name: str, deadline: float) -> None:
    """Ask the others for a supervised object that is not known here.

    Args:
        deadline: in `time.monotonic()` seconds.

    Raises:
        UnknownObject: no worker knows of one.
    """
    supervisors = supervisors_of(agent)
    for _, answer in ask_all(agent, state_of, (name,), deadline):
        if isinstance(answer, tuple | list):
            supervisors.hear(SupervisionState.of(tuple(answer)))
    if supervisors.state_of(name) is None:
        raise UnknownObject(f"no worker knows of a supervised object of the name {name!r}")
