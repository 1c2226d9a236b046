"""A clock that stands still until it is told to move, for tests of whatever takes a clock.

It has the shape of `time.monotonic`: call it, or read `now`. It never goes back.
"""

from __future__ import annotations


class ManualClock:
    """Monotonic seconds, advanced by hand. Not thread-safe.

    Args:
        start: first reading, in seconds.
    """

    __slots__ = ("now",)

    now: float

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on by `seconds`; the new time.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock can't go back by {-seconds} s")
        self.now += seconds
        return self.now

    def advance_to(self, moment: float) -> float:
        """Move on to `moment`, or stay where it is when that has passed; the new time."""
        self.now = max(self.now, moment)
        return self.now

    def __repr__(self) -> str:
        return f"ManualClock({self.now:.6f})"
