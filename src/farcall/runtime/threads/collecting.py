"""Destructors on this thread, run by the garbage collector: tell whether there are any.

Python collects garbage when objects are made, in whatever thread makes one, and runs there the
destructors of objects in cycles. So a destructor of the user's may run in the middle of farcall,
while the thread holds a lock of farcall's. If it makes a call then, the thread waits for itself.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Mapping
from typing import Any

from farcall.errors import NotInitialized

_NO_THREAD = -1


class Collecting:
    """Listens to Python's garbage collector until it is closed. Thread-safe.

    Attributes:
        thread: the identifier of the thread that collects garbage now; 0 while none does. In a
            process that was forked from a worker it is never 0, so that everything is refused.
        is_forked: whether this is such a process.
    """

    def __init__(self) -> None:
        self.thread = 0
        self.is_forked = False
        self._forked_from = ""
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: Mapping[str, Any]) -> None:
        self.thread = threading.get_ident() if phase == "start" else 0

    @property
    def is_here(self) -> bool:
        """Return whether the calling thread is in a destructor that the garbage collector runs."""
        return self.thread == threading.get_ident()

    def refuse(self, what: str) -> None:
        """Refuse what takes locks or waits.

        Raises:
            RuntimeError: the calling thread is collecting garbage.
            NotInitialized: this process was forked from the worker.
        """
        if self.defers(what):
            raise RuntimeError(
                f"{what} can't be used in a destructor that Python's garbage collector runs, since "
                "that may be in the middle of farcall; rpc_async can: another thread makes the call"
            )

    def defers(self, what: str) -> bool:
        """Return whether another thread has to do this: this one collects garbage.

        Raises:
            NotInitialized: this process was forked from the worker.
        """
        if self.is_forked:
            raise NotInitialized(
                f"{what} can't be used here: this process was forked from the worker "
                f"{self._forked_from!r}, whose agent does not live in it. A process that makes "
                "calls is a worker itself, with an init_rpc and a name of its own"
            )
        return self.is_here

    def close_after_fork(self, name: str) -> None:
        """Refuse everything from now on, in a process that was forked from this worker."""
        self.close()
        self._forked_from, self.is_forked = name, True
        self.thread = _NO_THREAD

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._note)
