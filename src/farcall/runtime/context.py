"""The call that the running code serves, and its agent."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol

import msgspec

from farcall.ids import RefId
from farcall.runtime.calls.call_names import Served
from farcall.serde import Only
from farcall.wire.messages import Turn


class WaitingPlace(Protocol):
    """The place of an executor that a waiting function leaves and takes again."""

    def waiting(self) -> AbstractContextManager[None]:
        """Wrap a wait: the function leaves its place to another."""

    def is_at_work(self) -> bool:
        """Return whether `waiting` has work in this thread. Stays so while a function runs."""


class CancelsCalls(Protocol):
    """See `calls.cancelling`."""

    def calls_of(self, served: CallBeingServed) -> None:
        """Cancel the calls that the function of a call has made."""


class ServingAgent(Protocol):
    """An agent, as far as it is known here. `farcall.runtime.current` has its type."""

    @property
    def executor(self) -> WaitingPlace: ...

    @property
    def cancelling(self) -> CancelsCalls: ...


class Caller(Protocol):
    """A caller, as far as it is known here. See `peers.Peer`."""

    only: Only | None  # what it may do here; None: everything
    name: str


class CallBeingServed(Protocol):
    """The call that a function serves, as far as it may ask. See `server_call.ServerCall`."""

    @property
    def peer(self) -> Caller: ...
    @property
    def cancelled(self) -> bool:
        """Return whether no caller waits for the outcome any more."""

    @property
    def is_unwanted(self) -> bool:
        """Return whether the caller has cancelled the call: what it calls ends, too."""

    @property
    def result_ref(self) -> RefId | None:
        """The slot for the result of a `remote()` call."""

    @property
    def held(self) -> tuple[Turn, ...]:
        """The turns at objects that calls hold which are made here, see `wire.messages.Extras`."""

    def limit(self) -> tuple[float, float, Served]:
        """Return the deadline, the caller's seconds, and what calls made here inherit."""

    def stopped_by(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Wrap a wait of the function: `stop` ends it when the call is cancelled."""


class CallContext(msgspec.Struct, frozen=True):
    """Set while a handler runs, and in every thread of an agent."""

    agent: ServingAgent
    deadline: float = math.inf  # time.monotonic() seconds; nested calls inherit it
    gradients: int = 0  # the autograd context, which nested calls carry on
    depth: int = 0  # of the call that is served; see `function_queue`
    served: CallBeingServed | None = None


current: ContextVar[CallContext | None] = ContextVar("farcall_call", default=None)
# Its methods, looked up once: each call uses them several times.
current_context, set_context, reset_context = current.get, current.set, current.reset

_NOT_SERVING = nullcontext()


def waiting() -> AbstractContextManager[None]:
    """Wrap a wait for farcall: the waiting function leaves its place to another."""
    context = current_context()
    return _NOT_SERVING if context is None else context.agent.executor.waiting()


def is_at_work() -> bool:
    """Return whether `waiting` has something to do in this thread.

    The answer stays the same while a function runs.
    """
    context = current_context()
    return context is not None and context.agent.executor.is_at_work()


def allowed_now() -> Only | None:
    """Return what the caller of the call may do that is served here, or None for all."""
    context = current_context()
    return None if context is None or context.served is None else context.served.peer.only
