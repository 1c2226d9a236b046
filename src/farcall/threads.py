"""The threads that farcall starts by itself, of which the end of the program needs to know."""

from __future__ import annotations

import threading
from collections.abc import Callable


class FarcallThread(threading.Thread):
    """A daemon thread of farcall. It may outlive the agent that started it, see `runtime.ending`.

    Args:
        target: what the thread runs.
        name: says what the thread is for; see docs/threads.md.
        what: what to call the work of this thread, in the log, if the program ends meanwhile.
    """

    def __init__(self, target: Callable[[], None], name: str, what: str = "") -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.what = what

    def try_start(self) -> str | None:
        """Start the thread. Returns None, or why the system has no more threads.

        A thread that could not be started may be tried again.
        """
        try:
            self.start()
        except (RuntimeError, MemoryError) as error:
            return f"{error or type(error).__name__} (a limit of processes, or of memory)"
        return None

    def join_if_started(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, if there is one to wait for."""
        if self.ident is not None and self is not threading.current_thread():
            self.join(timeout)
