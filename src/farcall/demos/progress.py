"""How a demo's training tells the process that started it how far it is.

The worker that trains holds a `Monitor`; the process that started it holds the other end of the
pipe (see `launch.py`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Progress:
    """Where a training run stands after an episode.

    Attributes:
        episode: episodes done, from 1.
        reward: reward of this episode.
        running_reward: exponentially averaged reward.
        env_steps: steps that all environments took so far.
        calls: remote calls made so far.
        seconds: time since training began.
        solved: whether this episode met the goal.
    """

    episode: int
    reward: float
    running_reward: float
    env_steps: int
    calls: int
    seconds: float
    solved: bool

    @property
    def env_steps_per_second(self) -> float:
        """Environment steps per second, over the whole run so far."""
        return self.env_steps / self.seconds if self.seconds else 0.0

    @property
    def calls_per_second(self) -> float:
        """Remote calls per second, over the whole run so far."""
        return self.calls / self.seconds if self.seconds else 0.0


class Monitor:
    """The training worker's line to the process that started it. Not thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, progress: Progress) -> None:
        """Sends `progress`. When the other process is gone, `stop_requested` says so."""
        with contextlib.suppress(OSError):
            self._connection.send(progress)

    def stop_requested(self) -> bool:
        """Whether the training should end now: it was told to, or nobody is watching any more.

        The other process only ever sends one thing, so a byte to read is the request, and so is
        the end of the pipe.
        """
        return self._connection.poll()
