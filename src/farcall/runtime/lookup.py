"""Asks the rendezvous who is where. A store may answer late, or never, or be gone for a while: so a
thread of its own asks, and nobody waits longer than he has time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from farcall.ids import Worker
from farcall.log import get_logger
from farcall.runtime.bell import Bell
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.uninterrupted import uninterrupted

logger = get_logger("farcall")

LOOK_AGAIN = 1.0  # seconds between looks at what a bell should have told

Ask = Callable[[str | int], Worker | None]


class NotAsked(Exception):
    """The store could not be asked. The message says why."""


class _Question:
    def __init__(self) -> None:
        self.bell = Bell()
        self.answer: Worker | None = None
        self.error: Exception | None = None


class Lookup:
    """Finds workers by name or id. Thread-safe.

    Args:
        name: of this worker.
        ask: asks the store, and may take any time. Raises RuntimeError, as torch's stores do, if
            the store is gone.
        reopen: connects to the store again. Raises RuntimeError or OSError if that fails.
    """

    def __init__(self, name: str, ask: Ask, reopen: Callable[[], None]) -> None:
        self._name = name
        self._ask = ask
        self._reopen = reopen
        self._lock = threading.Lock()  # guards the questions
        self._questions: dict[str | int, _Question] = {}
        # One, since a client of a store takes one operation after the other.
        self._threads = BriefThreads(f"farcall-find-{name}", 1)

    def find(self, key: str | int, deadline: float) -> Worker | None:
        """The live worker of this name or id, or None if there is none.

        Args:
            deadline: `time.monotonic()` seconds.

        Raises:
            NotAsked: the store is gone, or has not answered by the deadline.
        """
        question = uninterrupted(partial(self._question, key), f"farcall-ask-{self._name}")
        while not question.bell.wait(max(0.0, min(deadline - time.monotonic(), LOOK_AGAIN))):
            if time.monotonic() >= deadline:
                raise NotAsked("it has not answered in time")
        if question.error is not None:
            raise NotAsked(str(question.error).partition("\n")[0]) from question.error
        return question.answer

    def _question(self, key: str | int) -> _Question:
        """The question about this key that is open, or a new one."""
        with self._lock:
            known = self._questions.get(key)
            if known is not None:
                return known
            question = self._questions[key] = _Question()
        self._threads.run(partial(self._answer, key, question))
        return question

    def _answer(self, key: str | int, question: _Question) -> None:
        try:
            question.answer = self._ask_twice(key)
        except Exception as error:
            question.error = error
        finally:
            with self._lock:
                del self._questions[key]
            question.bell.ring()

    def _ask_twice(self, key: str | int) -> Worker | None:
        try:
            return self._ask(key)
        except RuntimeError as error:
            logger.debug("%s: the store is gone: %s", self._name, error)
        self._reopen()
        return self._ask(key)
