"""Measures how long a module computes: time neither computing nor idle is communication."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor


class Stopwatch:
    """Adds up stretches of time. One stretch at a time; it may end in another thread."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Begin a stretch."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """End the stretch, if one began."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measures what runs inside."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def starts_with_gradient_of(self, tensor: Tensor) -> None:
        """Begin a stretch, in backward passes, whenever the gradient of `tensor` comes."""
        tensor.register_hook(self._start)  # type: ignore[no-untyped-call]

    def stops_with_gradient_of(self, tensor: Tensor) -> None:
        """End a stretch, in backward passes, whenever the gradient of `tensor` is there."""
        tensor.register_hook(self._stop)  # type: ignore[no-untyped-call]

    def _start(self, gradient: Tensor) -> None:
        self.start()

    def _stop(self, gradient: Tensor) -> None:
        self.stop()

    def take(self) -> float:
        """Return the seconds measured since the last `take`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
