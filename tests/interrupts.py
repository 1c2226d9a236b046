"""Ctrl-C between any two instructions of a test."""

from __future__ import annotations

import signal
from collections.abc import Callable

# Python can lose sight of a signal that comes while a thread takes the GIL, until the next one
# comes. Without a next one a test ran on until the machine had no memory left.
AGAIN_SECONDS = 0.01


class Interrupts:
    """Raises KeyboardInterrupt in the main thread, where that happens to be. A context manager."""

    def __init__(self) -> None:
        self._armed = False

    def __enter__(self) -> Interrupts:
        self._usual = signal.signal(signal.SIGALRM, self._raise)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._usual)

    def end(self, run: Callable[[], object], *, after: float) -> bool:
        """Run it again and again until the interrupt, which comes `after` seconds from now.

        Returns False if the interrupt was swallowed, as it is in a destructor.
        """
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, after, AGAIN_SECONDS)
            while self._armed:
                run()
        except KeyboardInterrupt:
            return True
        finally:
            self._armed = False
        return False

    def _raise(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt
