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


class Collecting:
    """Listens to Python's garbage collector until it is closed. Thread-safe.

    Attributes:
        thread: the identifier of the thread that collects garbage now; 0 while none does.
    """

    def __init__(self) -> None:
        self.thread = 0
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
        """
        if self.is_here:
            raise RuntimeError(
                f"{what} can't be used in a destructor that Python's garbage collector runs, since "
                "that may be in the middle of farcall; rpc_async can: another thread makes the call"
            )

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._note)
