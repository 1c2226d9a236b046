"""The progress of a demo's training, told to the process that started it.

The worker that trains holds a `Monitor`; the process that started it holds the other end of the
pipe (see `launch.py`). The messages are the demo's own: any objects that can be pickled, best small
frozen dataclasses.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(frozen=True)
class WorkerStarted:
    """Sent once by each worker, as soon as its process runs the demo's code."""


class Monitor(Generic[P]):
    """The workers' line to the process that started them: the training worker's, after the start.

    Not thread-safe.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, progress: P) -> None:
        """Sends `progress`. When the other process is gone, `stop_requested` says so."""
        with contextlib.suppress(OSError):
            self._connection.send(progress)

    def started(self) -> None:
        """Says that this worker's process has started."""
        with contextlib.suppress(OSError):
            self._connection.send(WorkerStarted())

    def stop_requested(self) -> bool:
        """Return whether to end the training now: it was told to, or its watcher is gone.

        The other process only ever sends one thing, so a byte to read is the request, and so is
        the end of the pipe.
        """
        return self._connection.poll()
