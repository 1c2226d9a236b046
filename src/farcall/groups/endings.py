"""The ends of a group's workers, as far as they are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

OBITUARY_SECONDS = 1.0  # between the loss of a worker and the news of how its process ended


class Endings:
    """The known ends of a group's workers, by their numbers. Thread-safe."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}
        self._is_over = False
        self._changed = threading.Condition()

    def note(self, number: int, words: str) -> None:
        """Note how a worker ended. The first note stays."""
        with self._changed:
            self._words.setdefault(number, words)
            self._changed.notify_all()

    def finish(self) -> None:
        """Say that no more ends will be noted."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def numbers(self) -> set[int]:
        """Return the numbers of the workers that have ended."""
        with self._changed:
            return set(self._words)

    def wait(self, number: int, seconds: float) -> str | None:
        """Return in words how a worker ended; None if it has not after these seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or number in self._words, seconds)
            return self._words.get(number)

    def obituary_of(self, names: Sequence[str]) -> Callable[[str], str | None]:
        """Return what says how a worker ended, by its name, for `Losses.obituary`."""

        def obituary(name: str) -> str | None:
            return self.wait(names.index(name), OBITUARY_SECONDS) if name in names else None

        return obituary

    def wait_for_all(self, count: int, seconds: float) -> None:
        """Wait until so many have ended, or no more ends will be noted, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._words) >= count, seconds)
