"""Cancelled calls: `Future.cancel`, and the calls that a cancelled function has made."""

from __future__ import annotations

from typing import Any

from farcall.errors import Cancelled
from farcall.protocol.instructions import TransferKey
from farcall.runtime.calls.call_completion import CallCompletion
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.context import CallBeingServed
from farcall.runtime.machine import Machine
from farcall.runtime.membership.peers import PendingCall


class Cancelling:
    """Of one agent. Thread-safe. Each cancellation looks at all open calls."""

    def __init__(self, machine: Machine, completion: CallCompletion) -> None:
        self._machine = machine
        self._completion = completion

    def call_of(self, future: Future[Any]) -> bool:
        """Cancel the call that a future is of. Returns whether that had an effect."""
        for pending in self._completion.open_calls():
            if pending.future is future:
                return self._cancel(pending)
        if future.done() or self._completion.is_answered(future):
            return False
        complete_with(future, Cancelled("the call was cancelled before it was made"))
        return future._failed is not None

    def calls_of(self, served: CallBeingServed) -> None:
        """Cancel the calls that the function of a call has made."""
        for pending in self._completion.open_calls():
            if pending.parent is served:
                self._cancel(pending)

    def _cancel(self, pending: PendingCall) -> bool:
        """End a call now, and have its callee end what it does for it. `remote()` goes on."""
        pending.cancelled = True
        peer = pending.peer
        error = Cancelled(f"the call of {pending.name} on worker {peer.name!r} was cancelled")
        if pending in self._completion.waiting:
            key = TransferKey(peer.incarnation, pending.call_id, True)
            self._machine.stop_waiting(key, error)
            return True
        if pending.created is not None:
            return False
        if pending.future is None:
            if pending.sent:  # else `sent_and_awaited` sees that it is cancelled
                self._completion.sent_and_awaited(pending)
            return True
        return self._completion.abandon(pending, error)
