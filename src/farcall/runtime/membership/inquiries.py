"""Work that waits, without a thread, until the store has said where a worker is.

A thread that needs a worker which is not known here leaves its work. A thread for each name waits
for the store, and then does the work: no other thread is held up by a store that does not answer.
Work that needs something else that only others can bring about, such as the confirmation of a
reference, waits in the same way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from farcall.errors import CallError, FarcallError, RpcTimeout
from farcall.log import get_logger
from farcall.runtime.context import waiting
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.uninterrupted import uninterrupted
from farcall.transport.waiter import Waiter

logger = get_logger("farcall")

PIECE = 0.1  # seconds of one wait for the store: what waits may have different deadlines
MOST_NAMES = 32  # that are waited for at once

Look = Callable[[float], object]
Then = Callable[[FarcallError | None, object], None]


class _Waiting(NamedTuple):
    deadline: float
    then: Then


class Inquiries:
    """The names that one agent has asked for, and what waits for them. Thread-safe.

    Args:
        name: of this worker.

    Attributes:
        open: by key, what waits. A key is here until all that waited has gone on.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards what follows
        self.open: dict[object, deque[_Waiting]] = {}
        self._closed: CallError | None = None
        self._threads = BriefThreads(f"farcall-inquiry-{name}", MOST_NAMES)

    def ask(self, key: object, look: Look, deadline: float, then: Then) -> None:
        """Have a thread look for a worker, and go on when that has an outcome. Never waits for it.

        Args:
            key: whose outcomes are the same, such as a name.
            look: learns where the worker is, and takes no longer than a moment in
                `time.monotonic()` seconds. It raises RpcTimeout if the store has not answered by
                then, or another FarcallError if there is nothing to wait for. That does not count
                for work that was left after the call of `look`: the worker may be there since.
            deadline: `time.monotonic()` seconds.
            then: called with None and what `look` returned, or with the reason and None; in the
                order of the calls with this key, by another thread, and without locks. It must not
                wait.
        """
        # Uninterrupted, since later questions for the same name rely on the thread.
        uninterrupted(
            partial(self._ask, key, look, _Waiting(deadline, then)), f"farcall-inquire-{self._name}"
        )

    def _ask(self, key: object, look: Look, waiting: _Waiting) -> None:
        with self._lock:
            closed = self._closed
            if closed is None:
                queue = self.open.get(key)
                if queue is not None:
                    queue.append(waiting)
                    return
                self.open[key] = deque([waiting])
        if closed is not None:
            waiting.then(closed, None)
        else:
            self._threads.run(partial(self._look, key, look))

    def wait_behind(self, key: object, look: Look, deadline: float) -> None:
        """Wait until all that waits for a name now has gone on, whatever became of it.

        Args:
            key, look, deadline: see `ask`.

        Raises:
            TimeoutError: the deadline passed.
        """
        turn: Waiter[object] = Waiter()
        self.ask(key, look, deadline, lambda error, _: turn.deliver(error))
        with waiting():
            turn.wait(deadline)

    def _look(self, key: object, look: Look) -> None:
        while True:
            with self._lock:
                queue = self.open.get(key)
                if not queue:
                    self.open.pop(key, None)
                    return
                asked = set(queue)
            first = min(one.deadline for one in asked)
            until = min(first, time.monotonic() + PIECE)
            error: FarcallError | None = None
            found: object = None
            try:
                found = look(until)
            except FarcallError as failure:
                error = failure
            now = time.monotonic()
            if error is None:
                self._go_on(key, None, found)
            elif isinstance(error, RpcTimeout) and now >= until:  # else the store is gone
                self._go_on(key, error, None, {one for one in asked if one.deadline <= now})
            else:
                self._go_on(key, error, None, asked)

    def _go_on(
        self,
        key: object,
        error: FarcallError | None,
        found: object = None,
        only: set[_Waiting] | None = None,
    ) -> None:
        """Call what waits for a name: all of it, or only these."""
        with self._lock:
            queue = self.open.get(key, ())
            ended = [one for one in queue if only is None or one in only]
            for one in ended:
                self.open[key].remove(one)
        for one in ended:
            try:
                one.then(error, found)
            except Exception:  # the others wait, too
                logger.exception("an internal error after an inquiry")

    def close(self, error: CallError) -> None:
        """End every inquiry with this error: the agent shuts down. Does not wait for the store."""
        with self._lock:
            self._closed = error
            keys = list(self.open)
        for key in keys:
            self._go_on(key, error)
        self._threads.close(0)
