"""Requests of calls: from the function and its arguments to a frame, and a call that is counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from farcall.errors import Cancelled
from farcall.protocol.worker import WorkerMachine
from farcall.runtime.calls.call_completion import CallCompletion
from farcall.runtime.calls.call_names import OF_METHODS, method_of
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.limits import CallLimits, Limit
from farcall.runtime.calls.pickling import Pickling
from farcall.runtime.context import CallBeingServed, current_context
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.machine import Machine
from farcall.runtime.membership.peers import Peer, PendingCall
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.references.handles import References, RefHandle
from farcall.runtime.status import Status
from farcall.wire.frames import Frame
from farcall.wire.messages import Extras, Reference, Request, Turn

LEAST_SECONDS = 1e-3  # that a callee is told to have; 0 would be no limit


class IsSought(Exception):
    """A reference among the arguments is not even made yet, and the call may not wait for it."""


class Requests:
    """The requests of an agent. Thread-safe."""

    def __init__(
        self,
        status: Status,
        machine: Machine,
        references: References,
        completion: CallCompletion,
        gradients: DistributedGradients,
        coordinator: ShutdownCoordinator,
        limits: CallLimits,
        pickling: Pickling,
    ) -> None:
        self._status = status
        self._machine = machine
        self._references = references
        self._completion = completion
        self._gradients = gradients
        self._coordinator = coordinator
        self._limits = limits
        self._pickling = pickling

    def begin(
        self,
        peer: Peer,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        future: Future[Any] | None = None,
        created: RefHandle | None = None,
        sequence: int = 0,
        concurrency: int = 0,
        limit: Limit | None = None,
    ) -> tuple[PendingCall, Frame]:
        """Return a request that is counted as begun, and its frame.

        Args:
            limit: of a call that has begun, since its callee was sought; None: it begins now.
        """
        on: Sequence[RefHandle] = args[:1] if args and type(args[0]) is RefHandle else ()
        name, payload = self._pickling.dump_call(peer, function, args, kwargs or {}, len(on))
        handles = (*on, *payload.references) if on else payload.references
        # Only now: pickling may take any time, and is not remote.
        deadline, seconds, inherited = limit or self._limits.of_call(timeout)
        context = current_context()
        depth, served = (1, None) if context is None else (context.depth + 1, context.served)
        created_ref = None if created is None else created.ref
        pending = PendingCall(peer, name, deadline, seconds, future, created_ref, depth, inherited)
        if name in OF_METHODS:
            pending.method = method_of(name, args)
        references = tuple([handle.reference for handle in handles]) if handles else ()
        needs_pins = False
        if references or created is not None:
            needs_pins = WorkerMachine.needs_pins(
                references, peer.incarnation, creates=created is not None
            )
            if needs_pins:  # assigned only then: that takes as long as a small call of Python
                pending.is_noted = True
                if references:
                    references = self._wait_until_confirmed(handles, pending)
        try:
            self._coordinator.begin(pending)
            call_id = pending.call_id = peer.outgoing.begin(pending)
            # After that: a peer that is lost from now on finds the call there, and fails it.
            if peer.loss_cause is not None and peer.outgoing.outcome(call_id) is not None:
                raise peer.loss()
            extras = _come_from(served, pending, concurrency) if served or concurrency else None
            if limit is not None:
                seconds = _left(deadline)
            request = Request(name, 0.0 if created else seconds, depth=depth, extras=extras)
            if context is not None and context.gradients:
                request.no_grad = not torch.is_grad_enabled()
                tensors = payload.tensors
                # A thread that waits for the answer records before, and changes nothing meanwhile.
                waits = future is None and created is None
                sent = self._gradients.send(context.gradients, peer, tensors, waits)
                request.context, request.sent = sent
                if request.sent:
                    pending.recording = partial(
                        self._gradients.record, request.context, request.sent
                    )
            elif payload.tensors and self._status.advice.pending and torch.is_grad_enabled():
                self._status.advice.warn_of_gradients(peer.name, pending.name)
            if created is not None:
                request.creates, request.sequence = created.reference.number, sequence
            if handles:
                request.references, request.on_reference = references, bool(on)
                if needs_pins:
                    self._references.pin(peer.incarnation, call_id, handles)
                else:
                    # Until it answers, the callee's values are kept by our own use of them.
                    pending.handles = handles
            return pending, Frame(request, call_id, payload.body, payload.buffers)
        except BaseException as error:  # KeyboardInterrupt
            self._completion.interrupted(pending, error, may_be_sent=False)
            raise

    def _wait_until_confirmed(
        self, handles: Sequence[RefHandle], pending: PendingCall
    ) -> tuple[Reference, ...]:
        """Wait until references may be sent. Gives them as they travel.

        Raises:
            IsSought: one was not even made, and no thread waits for the outcome of the call.
        """
        refs = [handle.ref for handle in handles]
        callee = pending.peer.incarnation
        try:
            if self._references.where_sought(handles) is not None:
                if pending.future is not None or pending.created is not None:
                    raise IsSought
                self._references.wait_until_sent(handles, pending.deadline)
            self._machine.wait_until_confirmed(refs, callee, pending.deadline)
        except TimeoutError:
            raise self._completion.timeout(pending) from None
        return self._references.travelling(handles)


def _left(deadline: float) -> float:
    """Return the seconds up to a deadline; 0 for no limit."""
    return 0.0 if deadline == math.inf else max(deadline - time.monotonic(), LEAST_SECONDS)


def _come_from(
    served: CallBeingServed | None, pending: PendingCall, concurrency: int
) -> Extras | None:
    """Note whose function makes a call that was begun; return what its request says of turns.

    Raises:
        Cancelled: that call was cancelled, and perhaps before this one could be found.
    """
    held: tuple[Turn, ...] = ()
    if served is not None:
        pending.parent, held = served, served.held
        if served.is_unwanted:
            raise Cancelled("the call that is being served was cancelled by its caller")
    return Extras(concurrency, held) if held or concurrency else None
