"""Subscriptions of users to the joins and losses of workers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from farcall.runtime.calls.graph_breaks import methods_break_graphs
from farcall.runtime.membership.roster import Listener, MemberEvent, Roster


@methods_break_graphs
class Subscription:
    """Ends the calls of a function: call it, or leave its `with` block. Thread-safe, at any time.

    A call of the function that has begun goes on; none begins afterwards.
    """

    def __init__(self, roster: Roster, listener: Listener) -> None:
        self._roster = roster
        self._listener = listener

    def __call__(self) -> None:
        self._roster.dismiss(self._listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self()

    def __repr__(self) -> str:
        function = self._listener.hear
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"<Subscription of {name}, {'open' if self._listener.is_open else 'closed'}>"


class _Events:
    """News not taken yet, and the task that waits for more. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._heard: deque[MemberEvent] = deque()
        self._wake: Callable[[], object] | None = None
        self.is_over = False

    def hear(self, event: MemberEvent) -> None:
        with self._lock:
            self._heard.append(event)
            self._ring()

    def end(self) -> None:
        with self._lock:
            self.is_over = True
            self._ring()

    def _ring(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                wake()

    def take(self, wake: Callable[[], object]) -> MemberEvent | None:
        """Return the next event; or None, and `wake` is called once there is one, or the end."""
        with self._lock:
            if self._heard:
                return self._heard.popleft()
            if not self.is_over:
                self._wake = wake
            return None


@methods_break_graphs
class Membership:
    """An asynchronous iterator over events; see `farcall.rpc.membership`."""

    def __init__(self, roster: Roster, *, present: bool) -> None:
        self._events = events = _Events()
        self._roster = roster
        self._listener = Listener(events.hear, joins=True, leaves=True, end=events.end)
        roster.listen(self._listener, present=present)
        # A user who breaks out of the loop need not close it. Without a lock, as in any finalizer.
        weakref.finalize(self, self._listener.silence).atexit = False

    def close(self) -> None:
        """End the iteration. May be called by any thread, and more than once."""
        self._roster.dismiss(self._listener)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MemberEvent:
        loop = asyncio.get_running_loop()
        while True:
            is_news = asyncio.Event()

            def wake(is_news: asyncio.Event = is_news) -> None:
                loop.call_soon_threadsafe(is_news.set)

            event = self._events.take(wake)
            if event is not None:
                return event
            if self._events.is_over:
                raise StopAsyncIteration
            await is_news.wait()

    def __repr__(self) -> str:
        return f"<Membership, {'closed' if self._events.is_over else 'open'}>"
