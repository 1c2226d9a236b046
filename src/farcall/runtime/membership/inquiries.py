"""What has to wait until the store has said where a worker is, without a thread that waits for it.

Whoever needs a worker that is not known here leaves what is to be done then. A thread for each name
waits for the store, and does it: nobody else is held up by a store that does not answer.
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
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.uninterrupted import uninterrupted

logger = get_logger("farcall")

PIECE = 0.1  # seconds of one wait for the store: what waits may have different deadlines
MOST_NAMES = 32  # that are waited for at once

Look = Callable[[float], object]
Then = Callable[[FarcallError | None], None]


class _Waiting(NamedTuple):
    deadline: float
    then: Then


class Inquiries:
    """The names that one agent has asked for, and what waits for them. Thread-safe.

    Args:
        name: of this worker.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards what follows
        self._waiting: dict[object, deque[_Waiting]] = {}
        self._closed: CallError | None = None
        self._threads = BriefThreads(f"farcall-inquiry-{name}", MOST_NAMES)

    def ask(self, key: object, look: Look, deadline: float, then: Then) -> None:
        """Have a thread look for a worker, and go on when that has an outcome. Never waits for it.

        Args:
            key: whose outcomes are the same, such as a name.
            look: learns where the worker is, and takes no longer than a moment in
                `time.monotonic()` seconds. It raises RpcTimeout if the store has not answered by
                then, or another FarcallError if there is nothing to wait for.
            deadline: `time.monotonic()` seconds.
            then: called with None when the worker is known, else with the reason; in the order of
                the calls with this key, by another thread, and without locks. It must not wait.
        """
        # Uninterrupted, since whoever asks for the same name later relies on the thread.
        uninterrupted(
            partial(self._ask, key, look, _Waiting(deadline, then)), f"farcall-inquire-{self._name}"
        )

    def _ask(self, key: object, look: Look, waiting: _Waiting) -> None:
        with self._lock:
            closed = self._closed
            if closed is None:
                queue = self._waiting.get(key)
                if queue is not None:
                    queue.append(waiting)
                    return
                self._waiting[key] = deque([waiting])
        if closed is not None:
            waiting.then(closed)
        else:
            self._threads.run(partial(self._look, key, look))

    def is_asking(self, key: object) -> bool:
        """Whether something waits for this name. Needs no lock."""
        return key in self._waiting

    def _look(self, key: object, look: Look) -> None:
        while True:
            with self._lock:
                queue = self._waiting.get(key)
                if not queue:
                    self._waiting.pop(key, None)
                    return
                first = min(one.deadline for one in queue)
            until = min(first, time.monotonic() + PIECE)
            error: FarcallError | None = None
            try:
                look(until)
            except FarcallError as found:
                error = found
            now = time.monotonic()
            is_silent = isinstance(error, RpcTimeout) and now >= until  # else the store is gone
            self._go_on(key, error, now if is_silent else None)

    def _go_on(self, key: object, error: FarcallError | None, now: float | None) -> None:
        """Call what waits for a name: all of it, or what is late if `now` is given."""
        with self._lock:
            queue = self._waiting.get(key)
            if queue is None:
                return
            ended = [one for one in queue if now is None or one.deadline <= now]
            for one in ended:
                queue.remove(one)
        for one in ended:
            try:
                one.then(error)
            except Exception:  # the others wait, too
                logger.exception("an internal error after an inquiry")

    def close(self, error: CallError) -> None:
        """The agent shuts down: what waits goes on with this error. Does not wait for the store."""
        with self._lock:
            self._closed = error
            keys = list(self._waiting)
        for key in keys:
            self._go_on(key, error, None)
        self._threads.close(0)
