"""Asynchronous calls that another thread makes than the one that asked for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from farcall.errors import CallError, FarcallError, RpcTimeout, SerializationError
from farcall.ids import WorkerInfo
from farcall.runtime.calls.future import FutureOfCall, complete_with
from farcall.runtime.machine import Machine
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.threads.executor import Executor
from farcall.serde import Serializer
from farcall.wire.messages import OnDevice

Call = Callable[..., torch.futures.Future[Any]]


class LaterCalls:
    """Of one agent. Thread-safe.

    Args:
        call_async: see `CallClient`.
    """

    def __init__(
        self,
        machine: Machine,
        directory: Directory,
        serializer: Serializer,
        executor: Executor,
        coordinator: ShutdownCoordinator,
        call_async: Call,
    ) -> None:
        self._machine = machine
        self._directory = directory
        self._serializer = serializer
        self._executor = executor
        self._coordinator = coordinator
        self._call_async = call_async

    def soon(self, future: FutureOfCall[Any], *call: Any) -> None:
        """Make a call that a destructor asks for which the garbage collector runs.

        Args:
            future: gets the outcome.
            call: arguments of `call_async`.
        """

        def then(error: CallError | None) -> None:
            if error is None:
                self._executor.submit(partial(self._make, future, *call))
            else:
                complete_with(future, error)

        self._machine.soon(then)

    def when_known(
        self,
        future: FutureOfCall[Any],
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        limit: tuple[float, float],
    ) -> bool:
        """Make a call when the store has said where its callee is.

        The arguments are pickled now, and rebuilt then: what their owner does to them meanwhile
        changes nothing.

        Args:
            future: gets the outcome.
            limit: when the call must end, in `time.monotonic()` seconds, and how long that is.

        Returns:
            Whether the arguments can be kept. If they can't, nothing was done.
        """
        serializer = self._serializer
        try:
            dumped = serializer.dump((tuple(args), dict(kwargs or {})))
        except SerializationError:
            return False
        if any(isinstance(buffer, OnDevice) for buffer in dumped.buffers):
            return False
        buffers = [bytearray(one) for one in dumped.buffers]
        deadline, seconds = limit
        waiting = object()
        name = to.name if isinstance(to, WorkerInfo) else to

        def then(error: FarcallError | None) -> None:
            try:
                go_on(error)
            finally:
                self._coordinator.end(waiting)

        def go_on(error: FarcallError | None) -> None:
            if isinstance(error, RpcTimeout):
                error = RpcTimeout(f"the call took longer than {seconds:g} s: {error}")
            if error is not None:
                complete_with(future, error)
                return
            try:
                rebuilt, named = serializer.load(dumped.body, buffers, references=dumped.references)
            except BaseException as failure:
                complete_with(future, failure)
                return
            left = 0.0 if deadline == math.inf else max(deadline - time.monotonic(), 1e-3)
            self._make(future, to, function, rebuilt, named, left)

        self._coordinator.begin(waiting)  # a graceful shutdown waits for the call
        look = partial(self._directory.look_up, to)
        self._machine.inquiries.ask(name, look, deadline, then)
        return True

    def _make(self, future: FutureOfCall[Any], *call: Any) -> None:
        def hand_on(made: torch.futures.Future[Any]) -> None:
            try:
                future.set_result(made.value())
            except BaseException as error:
                complete_with(future, error)

        try:
            self._call_async(*call).add_done_callback(hand_on)
        except BaseException as error:
            complete_with(future, error)
