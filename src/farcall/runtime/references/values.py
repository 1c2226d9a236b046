"""The values that live in this process and are referred to from elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from farcall.runtime.references.method_gate import MethodGate
from farcall.serde import StoredError


class ValueSlot:
    """The slot of a remote value, empty until the function that makes it ends.

    Set or failed once. Thread-safe.
    """

    __slots__ = ("_callbacks", "_error", "_lock", "_value", "gate", "on_dropped")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[Callable[[ValueSlot], None], None] | None = {}
        self._value: Any = None
        self._error: StoredError | None = None
        # Called once if no reference is left before the value is there.
        self.on_dropped: Callable[[], None] | None = None
        self.gate: MethodGate | None = None  # None if any number of its methods may run at once

    def guard(self, concurrency: int) -> None:
        """Let so many calls of its methods run at once (0: any). Before the first one arrives."""
        if concurrency > 0:
            self.gate = MethodGate(concurrency)
            self.when_ready(self.gate.open)

    @property
    def is_ready(self) -> bool:
        return self._callbacks is None

    def set(self, value: Any) -> None:
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        self._finish(None, StoredError(error))

    def _finish(self, value: Any, error: StoredError | None) -> None:
        with self._lock:
            if self._callbacks is None:
                return
            self._value, self._error = value, error
            callbacks, self._callbacks = self._callbacks, None
            self.on_dropped = None
        for callback in callbacks:
            callback(self)

    def when_ready(self, callback: Callable[[ValueSlot], None]) -> None:
        """Call back once, in the thread that sets the value, or now if it is set.

        The callback must not raise.
        """
        with self._lock:
            if self._callbacks is not None:
                self._callbacks[callback] = None
                return
        callback(self)

    def remove_callback(self, callback: Callable[[ValueSlot], None]) -> None:
        """Undo `when_ready`. No effect if the callback was called, or is being called."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.pop(callback, None)

    def drop(self) -> None:
        """Let go of the value: the last reference is gone."""
        on_dropped, self.on_dropped = self.on_dropped, None
        if on_dropped is not None:
            on_dropped()

    def kill(self, error: BaseException) -> None:
        """Let go of the value, made or not; `get` raises this. No effect after a failure."""
        with self._lock:
            if self._error is not None:
                return
            self._error = StoredError(error)  # first: `get` takes no lock
            killed, self._value = self._value, None
            callbacks, self._callbacks = self._callbacks or {}, None
        del killed  # its destructor may run here
        self.drop()
        for callback in callbacks:
            callback(self)
        if self.gate is not None:
            self.gate.end()

    @property
    def is_failed(self) -> bool:
        """Return whether there will never be a value."""
        return self._error is not None

    def get(self) -> Any:
        """Return the value, or raise what the function raised. Only when `is_ready`."""
        value = self._value
        if self._error is not None:
            raise self._error.error()
        return value

    def described_state(self) -> str:
        """Return in a few words whether the value is there. Takes no lock, runs no user code."""
        if not self.is_ready:
            return "not made yet"
        return "ready" if self._error is None else f"failed: {self._error.type_name}"

    def wait(self, deadline: float, done: threading.Event) -> bool:
        """Sleep until the value is there.

        Args:
            deadline: `time.monotonic()` seconds.
            done: ends the wait when it is set.

        Returns:
            False if the value is not there.
        """

        def wake(_: ValueSlot) -> None:
            done.set()

        self.when_ready(wake)
        try:
            if deadline == math.inf:
                done.wait()
            else:
                done.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self.remove_callback(wake)
        return self.is_ready
