"""The source of events for the leader of an executor. Its errors are logged."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from farcall.log import get_logger
from farcall.transport.base import Endpoint, Event

logger = get_logger("farcall")


class Handler(Protocol):
    """The agent's handler of events and time."""

    @property
    def cancelling(self) -> Any:
        """The canceller of the calls of futures, see `calls.cancelling`."""

    def on_thread_start(self) -> None:
        """Prepare a thread. Called in every thread before its first work."""

    def handle(self, event: Event) -> None:
        """Handle an event that arrived. May call `Executor.submit`."""

    def before_sleep(self) -> float:
        """Do the work that is due. Return when more is due: `time.monotonic()` seconds, or inf."""

    def on_shortage(self) -> None:
        """Functions are held back for want of threads. Called again and again while they are."""


class EventSource:
    """An endpoint and the handler of its events. For one thread at a time, but for `handle`."""

    def __init__(self, name: str, endpoint: Endpoint, handler: Handler) -> None:
        self._name = name
        self._endpoint = endpoint
        self._handler = handler

    def handle(self, event: Event) -> None:
        try:
            self._handler.handle(event)
        except BaseException:
            self.log_handling(event)

    def log_handling(self, event: Event) -> None:
        """Log the exception that is being handled: the handler of events raised it."""
        logger.exception("%s: an internal error while handling %r", self._name, event)

    def before_sleep(self) -> float:
        try:
            return self._handler.before_sleep()
        except BaseException:
            logger.exception("%s: an internal error in a timer", self._name)
            return time.monotonic() + 1.0

    def poll(self) -> Event | None:
        try:
            return self._endpoint.poll()
        except BaseException:
            logger.exception("%s: an internal error while receiving", self._name)
            return None

    def next(self, due: float) -> Event | None:
        timeout = None if due == math.inf else max(0.0, due - time.monotonic())
        try:
            return self._endpoint.next(timeout)
        except BaseException:
            logger.exception("%s: an internal error while receiving", self._name)
            return None
