"""Calls that another thread makes than the one that asked for them: they need something first, and
the asking thread must not wait.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from farcall.errors import CallError, FarcallError, Refused, RpcTimeout, SerializationError
from farcall.ids import WorkerInfo
from farcall.runtime.calls.future import Future, FutureOfCall, complete_with
from farcall.runtime.calls.kept_bytes import KeptBytes
from farcall.runtime.calls.limits import Limit
from farcall.runtime.calls.outboxes import LOOK_AGAIN, OVERHEAD
from farcall.runtime.context import CallContext, current_context, set_context
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.machine import Machine
from farcall.runtime.membership.directory import Directory, plain_key
from farcall.runtime.membership.inquiries import Look
from farcall.runtime.membership.peers import Peer
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.options.timeouts import ran_too_long
from farcall.runtime.references.handles import References, RefHandle
from farcall.runtime.references.sought import SOUGHT, Sought
from farcall.runtime.threads.bell import Bell
from farcall.runtime.threads.executor import Executor
from farcall.serde import Serializer
from farcall.transport.uninterrupted import uninterrupted
from farcall.wire.messages import OnDevice

To = str | int | WorkerInfo | Peer  # the last in a call that has waited for it
Call = Callable[..., Future[Any]]
Make = Callable[[Peer, Sequence[Any], Mapping[str, Any], Limit], object]


class NotKept(SerializationError):
    """The arguments of a call can't be kept for later."""


class LaterCall(msgspec.Struct, eq=False):
    """A call that is to be made when its callee, and the owners of its references, are known."""

    to: To
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    handles: Sequence[RefHandle]  # of the references among the arguments
    limit: Limit
    context: CallContext | None  # the depth and the autograd context of its asker
    grad: bool  # whether grad was enabled there
    variables: contextvars.Context  # those of its asker
    # One of these two is called in the end; the second also with what the first raises.
    make: Make | None = None  # makes it
    fail: Callable[[BaseException], object] | None = None
    created: RefHandle | None = None  # the reference that it makes
    peer: Peer | None = None  # its callee
    key: object = None  # what it waits at
    size: int = 0  # bytes of its arguments, about


class LaterCalls:
    """Of one agent. Thread-safe.

    Args:
        most: how many bytes of arguments may be kept for one worker, see `KeptBytes`.
        call_async: see `CallClient`.
    """

    def __init__(
        self,
        machine: Machine,
        directory: Directory,
        references: References,
        gradients: DistributedGradients,
        serializer: Serializer,
        executor: Executor,
        coordinator: ShutdownCoordinator,
        most: int,
        call_async: Call,
    ) -> None:
        self._machine = machine
        self._inquiries = machine.inquiries
        self._directory = directory
        self._references = references
        self._gradients = gradients
        self._serializer = serializer
        self._executor = executor
        self._coordinator = coordinator
        self._kept = KeptBytes(most)
        self._call_async = call_async

    def soon(self, future: FutureOfCall[Any], *call: Any) -> None:
        """Make a call that a destructor asks for which the garbage collector runs.

        Args:
            future: gets the outcome.
            call: arguments of `call_async`.
        """

        def then(error: CallError | None) -> None:
            if error is None:
                self._executor.submit(partial(self.complete, future, *call))
            else:
                complete_with(future, error)

        self._machine.soon(then)

    def complete(self, future: FutureOfCall[Any], *call: Any) -> None:
        """Make a call now, by `call_async`, and leave its outcome to a future. Never raises."""

        def hand_on(made: torch.futures.Future[Any]) -> None:
            if future.done():
                return
            try:
                future.set_result(made.value())
            except BaseException as error:
                failure = error
            else:
                return
            try:
                complete_with(future, failure)  # not in the handler, as in `ServerCall.run`
            finally:
                del failure

        try:
            made = self._call_async(*call)
            future.made = made
            if future.done():  # it was cancelled just now
                made.cancel()
            made.add_done_callback(hand_on)
        except BaseException as error:
            complete_with(future, error)

    def keep(
        self,
        to: To,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        limit: Limit,
    ) -> LaterCall:
        """Return a call to be left, with copies of its arguments: they may change meanwhile.

        Args:
            limit: of the call.

        Raises:
            NotKept: that can't be.
            FarcallError: one of the references among the arguments is of no use.
        """
        context = current_context()
        gradients = context.gradients if context else 0
        args, kwargs, handles, size = self._copy(args, kwargs or {}, gradients)
        if context is not None:
            gradients, depth, served = context.gradients, context.depth, context.served
            context = CallContext(context.agent, gradients=gradients, depth=depth, served=served)
        grad, variables = torch.is_grad_enabled(), contextvars.copy_context()
        return LaterCall(to, args, kwargs, handles, limit, context, grad, variables, size=size)

    def leave(self, call: LaterCall) -> None:
        """Make a call when what it needs is known. Waits only while too many bytes are kept."""
        # Uninterrupted: it has one end, also if Ctrl-C comes.
        step = partial(self._leave, call)
        while (
            full := uninterrupted(step, f"farcall-inquire-{self._references.me.name}")
        ) is not None:
            deadline, seconds, _ = call.limit
            left = deadline - time.monotonic()
            if left <= 0:
                assert call.fail is not None
                call.fail(self._kept.refusal(key_of(call.to), seconds))
                return
            full.wait(min(left, LOOK_AGAIN))

    def _leave(self, call: LaterCall) -> Bell | None:
        full = self._kept.take(key_of(call.to), call.size)
        if full is None:
            self._coordinator.begin(call)  # a graceful shutdown waits for it
            if key_of(call.to) not in self._inquiries.open:
                call.peer = self._directory.known(call.to)
            self._go_on(call, None, None)
        return full

    def _copy(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], gradients: int
    ) -> tuple[Sequence[Any], Mapping[str, Any], Sequence[RefHandle], int]:
        """Arguments with memory of their own, the handles among them, and their bytes."""
        try:
            payload = self._serializer.dump((tuple(args), dict(kwargs)))
            if any(isinstance(buffer, OnDevice) for buffer in payload.buffers):
                raise NotKept("a tensor is on another device")
            buffers = [bytearray(one) for one in payload.buffers]
            size = OVERHEAD + len(payload.body) + sum(map(len, buffers))
            attach = None
            if gradients and payload.tensors:
                attach = self._gradients.keep(payload.tensors)
            args, kwargs = self._serializer.load(
                payload.body, buffers, references=payload.references, attach=attach
            )
        except (SerializationError, Refused) as error:
            why = "the arguments can't be kept until the owner of a reference among them is known"
            raise NotKept(f"{why}: {error}") from error
        return args, kwargs, payload.references, size

    def _wait(self, call: LaterCall, key: object, look: Look) -> None:
        call.key = key
        created, deadline = call.created, call.limit[0]
        if created is not None and created.owner == SOUGHT:
            self._references.sought_at(created, Sought(key, look, deadline))
        place = self._references.where_sought(call.handles)
        until = deadline if place is None else place.until(deadline)
        self._inquiries.ask(key, look, until, partial(self._go_on, call))

    def _go_on(self, call: LaterCall, error: FarcallError | None, found: object) -> None:
        """Go on: the thing a call waited for is there, or never will be, or it is time to look."""
        try:
            if isinstance(error, RpcTimeout):
                deadline, seconds, _ = call.limit
                if time.monotonic() < deadline:
                    error = None
                else:
                    error = RpcTimeout(f"{ran_too_long(seconds)}: {error}")
            if error is not None:
                raise error
            self._references.travelling(call.handles)  # one may have been sought in vain
            if call.key == key_of(call.to) and isinstance(found, Peer):
                call.peer = found
            peer = call.peer
            lacks = self._lacks(call, peer)
            if lacks is not None:
                self._wait(call, *lacks)
                return
            assert peer is not None
            self._make(call, peer)
        except BaseException as failure:
            assert call.fail is not None
            call.fail(failure)
        self._kept.give_back(key_of(call.to), call.size)
        self._coordinator.end(call)

    def _lacks(self, call: LaterCall, peer: Peer | None) -> tuple[object, Look] | None:
        """Return the first thing that a call has to wait for, if there is any."""
        if peer is None:
            return key_of(call.to), partial(self._directory.look_up, call.to)
        place = self._references.where_sought(call.handles)
        if place is not None:
            return place.key, place.look
        refs = [handle.ref for handle in call.handles]
        if refs:
            look = partial(self._confirm, refs, peer.incarnation)
            try:
                look(0.0)
            except RpcTimeout:
                return (peer.incarnation, *refs), look
        return None

    def _confirm(self, refs: Sequence[Any], callee: int, until: float) -> None:
        try:
            self._machine.wait_until_confirmed(refs, callee, until)
        except TimeoutError:
            what = "the owner of a reference among its arguments has not confirmed it"
            raise RpcTimeout(what) from None

    def _make(self, call: LaterCall, peer: Peer) -> None:
        assert call.make is not None
        call.variables.run(set_context, call.context)
        with torch.set_grad_enabled(call.grad):
            call.variables.run(call.make, peer, call.args, call.kwargs, call.limit)


def key_of(to: To) -> str | int:
    """Return the key at which calls of a worker named so wait, in their order: see `Inquiries`."""
    if isinstance(to, Peer):
        return to.name
    key = plain_key(to)
    return key.name if isinstance(key, WorkerInfo) else key
