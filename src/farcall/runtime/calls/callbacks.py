"""The callbacks of futures: run in order, in a stack of bounded depth, and to the end.

torch runs the callbacks of a future inside of `set_result`. A callback that completes another
future runs that one's callbacks inside of its own frame, and so on: in a chain of some hundred
futures the stack is full. So a thread runs at most `MAX_DEPTH` callbacks inside of each other. It
keeps those that come later in a queue, and runs them when the outermost one has ended.

A callback that waits for what lies in the queue of its own thread would wait forever; so a wait of
farcall runs the queue first (`run_waiting_callbacks`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from farcall.log import get_logger
from farcall.runtime.threads.forked import call_ending_forks
from farcall.runtime.threads.isolation import call_isolated
from farcall.serde import text_of

logger = get_logger("farcall")

MAX_DEPTH = 8

# How long a callback that is added to a future that is done waits for those before it, in seconds.
# No longer: they may wait for what its thread does next.
STAND_BACK = 0.1


class _Stack(threading.local):
    """The callbacks that run in this thread, inside of each other, and those that wait for that."""

    def __init__(self) -> None:
        self.depth = 0
        self.queue: deque[Callback] = deque()


_stack = _Stack()


class Completable(Protocol):
    """A future."""

    def done(self) -> bool:
        """Return whether it is complete."""


def run_waiting_callbacks(until: Completable) -> None:
    """Run what waits in this thread for callbacks to end, as long as a future is not done.

    For a callback that is about to wait for that future.
    """
    queue = _stack.queue
    while queue and not until.done():
        queue.popleft().run()


class Callback:
    """A callback of a future, which keeps its place among the others.

    A thread that completes a future runs its callbacks in order. But as soon as the future is done,
    and that is before the first of them begins, torch runs one that is added there and then.

    Args:
        future: what the callback gets.
        callback: runs once, and may raise anything. That is handed to `on_error`, or logged.
        others: the callbacks of the future that have not ended, in order.
        on_error: completes the future behind the callback, if there is one. Must not raise.
    """

    __slots__ = ("_callback", "_ended", "_future", "_on_error", "_others", "added_by", "run_by")

    def __init__(
        self,
        future: Any,
        callback: Callable[[Any], None],
        others: list[Callback],
        on_error: Callable[[BaseException], None] | None,
    ) -> None:
        self._future = future
        self._callback: Callable[[Any], None] | None = callback
        self._others = others
        self._on_error = on_error
        self._ended = threading.Lock()  # released at the end
        self._ended.acquire()
        # Threads, or 0: which is about to add it, and which runs it.
        self.added_by = threading.get_ident()
        self.run_by = 0

    def __call__(self, _: object) -> None:
        me = threading.get_ident()
        if self.added_by == me:
            self._stand_back(me)
        elif _stack.depth >= MAX_DEPTH:
            _stack.queue.append(self)
            return
        self.run()
        if not _stack.depth:
            while _stack.queue:
                _stack.queue.popleft().run()

    def run(self) -> None:
        """Run it now. Never raises."""
        stack = _stack
        stack.depth += 1
        try:
            call_isolated(self._run)
        except BaseException as error:
            self._fail(error)
        finally:
            stack.depth -= 1

    def _run(self) -> None:
        self.run_by = threading.get_ident()
        callback, self._callback = self._callback, None
        future, self._future = self._future, None
        try:
            if callback is not None:
                call_ending_forks(callback, future)
        finally:
            self._others.remove(self)
            self._ended.release()

    def _fail(self, error: BaseException) -> None:
        if self._on_error is not None:
            self._on_error(error)
        else:
            logger.error("a callback of a future raised:\n%s", text_of(error))

    def is_of(self, callback: object) -> bool:
        """Return whether this is an addition of that callback."""
        mine = self._callback
        return mine is callback or getattr(mine, "callback", None) is callback

    def take_back(self) -> bool:
        """Have it do nothing; return whether it had not begun."""
        had_not_begun = self._callback is not None
        self._callback = None
        return had_not_begun

    def _stand_back(self, me: int) -> None:
        """Wait for those before this, unless it is one of them that added it."""
        others = tuple(self._others)
        if any(other.run_by == me for other in others):
            return
        deadline = time.monotonic() + STAND_BACK
        for other in others[: others.index(self)]:
            if not other._ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return
            other._ended.release()
