"""Which agent the running code belongs to, and which call it serves.

The process's default agent is the one variable below `rpc.py` that is not part of an agent; only
`rpc.py` sets it.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

from farcall.errors import NotInitialized

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent
    from farcall.runtime.calls.inbound import Job


class CallContext(msgspec.Struct, frozen=True):
    """Set while a handler runs, and in every thread of an agent."""

    agent: Agent
    deadline: float = math.inf  # time.monotonic() seconds; nested calls inherit what is left
    gradients: int = 0  # the autograd context, which nested calls carry on
    depth: int = 0  # of the call that is served; see `function_queue`
    job: Job | None = None  # the call that is served


current: ContextVar[CallContext | None] = ContextVar("farcall_call", default=None)
# Its methods, looked up once: each call uses them several times.
current_context, set_context, reset_context = current.get, current.set, current.reset
_default: Agent | None = None


def set_default_agent(agent: Agent | None) -> None:
    """Make this the agent of all code that does not run in a handler. For `rpc.py` only."""
    global _default  # noqa: PLW0603
    _default = agent


def default_agent() -> Agent | None:
    """The process's default agent, if there is one."""
    return _default


def current_agent() -> Agent:
    """The agent that received the call being served; elsewhere, the process's default agent.

    Raises:
        NotInitialized: there is neither.
    """
    context = current_context()
    agent = _default if context is None else context.agent
    if agent is None:
        raise NotInitialized(
            "RPC has not been initialized: Current RPC agent is not set! Did you initialize the "
            "RPC framework, with farcall.rpc.init_rpc?"
        )
    return agent
