"""The status of an agent, known to every part of it."""

from __future__ import annotations

from farcall.errors import CallError, Cancelled
from farcall.ids import Worker
from farcall.runtime.advice import Advice
from farcall.runtime.membership.peers import Peer


class Status:
    """Thread-safe: every attribute is one word.

    Args:
        me: the agent's worker.
        rpc_timeout: seconds that a call may take by default; 0 for no limit.
        advice: the warnings that were not given yet.

    Attributes:
        is_closed: whether the agent was shut down.
        is_leaving: whether the user has called shutdown; that others go is no surprise then.
    """

    def __init__(self, me: Worker, rpc_timeout: float, advice: Advice) -> None:
        self.me = me
        self.rpc_timeout = rpc_timeout
        self.advice = advice
        self.is_closed = False
        self.is_leaving = False

    def closed_error(self) -> Cancelled:
        """Return what the shutdown of the agent ends calls with."""
        return Cancelled(f"the agent of {self.me.name!r} was shut down")

    def ended(self, peer: Peer) -> CallError:
        """Return what a call ends with when the loss of its peer or our shutdown ended it."""
        return self.closed_error() if self.is_closed else peer.loss()
