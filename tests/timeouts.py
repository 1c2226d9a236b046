"""Ends tests that take too long, by one thread for all of them: pytest-timeout starts one each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic  # not by `time`, since tests put other clocks there

import pytest
from pytest_timeout import Settings, timeout_timer


class Alarm:
    """Calls a function in a thread of its own when a time has passed, unless cancelled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ring: Callable[[], object] | None = None
        self._due = 0.0
        self._wakes = 0.0

    def set(self, seconds: float, ring: Callable[[], object]) -> None:
        """Have `ring` called in so many seconds, and nothing that was set before."""
        with self._changed:
            self._due, self._ring = monotonic() + seconds, ring
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="alarm", daemon=True)
                self._thread.start()
            # Most tests have the same limit. So the thread mostly wakes before the next one passes.
            elif self._due < self._wakes:
                self._changed.notify()

    def cancel(self) -> None:
        """Have nothing called."""
        with self._changed:
            self._ring = None

    def _watch(self) -> None:
        while True:
            with self._changed:
                ring, left = self._ring, self._due - monotonic()
                if ring is None or left > 0:
                    self._wakes = float("inf") if ring is None else self._due
                    self._changed.wait(None if ring is None else left)
                    continue
                self._ring = None
            ring()


ALARM = Alarm()


def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool | None:
    """Take the place of pytest-timeout's own timer, which takes 0.4 ms of each test."""
    if settings.method != "thread":
        return None
    ALARM.set(settings.timeout, partial(_end, item, settings))
    item.cancel_timeout = ALARM.cancel  # type: ignore[attr-defined]  # called by pytest-timeout
    return True


def _end(item: pytest.Item, settings: Settings) -> None:
    """Show the stacks of all threads, and end this process."""
    if hasattr(item.config, "workerinput"):  # of xdist, where stdout leads nowhere
        item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(item)
        os.dup2(2, 1)
    timeout_timer(item, settings)
