"""The agent that the running code belongs to.

The process's default agent is the one variable below `rpc.py` that is not part of an agent; only
`rpc.py` sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farcall.errors import NotInitialized
from farcall.runtime.agent import Agent
from farcall.runtime.context import current_context

_default: Agent | None = None
# The context's agent is known by two of its attributes only, so that `context` needs no `Agent`.
_context: Callable[[], Any] = current_context


def set_default_agent(agent: Agent | None) -> None:
    """Make this the agent of all code that does not run in a handler. For `rpc.py` only."""
    global _default  # noqa: PLW0603
    _default = agent


def default_agent() -> Agent | None:
    """Return the process's default agent, if there is one."""
    return _default


def current_agent() -> Agent:
    """Return the agent that received the call being served; elsewhere, the default agent.

    Raises:
        NotInitialized: there is neither.
    """
    context = _context()
    agent: Agent | None = _default if context is None else context.agent
    if agent is None:
        raise NotInitialized(
            "RPC has not been initialized: Current RPC agent is not set! Did you initialize the "
            "RPC framework, with farcall.rpc.init_rpc?"
        )
    return agent
