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
from farcall.runtime.threads.bell import Bell
from farcall.threads import FarcallThread
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.uninterrupted import uninterrupted

logger = get_logger("farcall")

LOOKUP_SECONDS = 60.0  # for a rendezvous, where no call says how long
LOOK_AGAIN = 1.0  # seconds between looks at what a bell should have told
STUCK_SECONDS = 5.0  # for an answer; then the connection to the store may lead nowhere
REMIND_SECONDS = 20.0  # between two questions for a worker's own name
MOST_STUCK = 2  # threads that wait for such answers

Ask = Callable[[str | int], Worker | None]


class NotAsked(Exception):
    """The store could not be asked. The message says why."""


class Reminder:
    """Asks for this worker's own name now and then.

    A worker that asks nothing would not notice that the store was started again, and has forgotten
    it. Newcomers could not find it.

    Args:
        name: of this worker.
        find: see `Lookup.find`.
    """

    def __init__(self, name: str, find: Callable[[str, float], object]) -> None:
        self._name = name
        self._find = find
        self._ended = threading.Event()
        self._thread = FarcallThread(self._remind, f"farcall-remind-{name}")

    def start(self) -> None:
        """Begin. If the system has no thread for that, only this worker's own questions remind."""
        refused = self._thread.try_start()
        if refused is not None:
            logger.debug("%s: the store is not reminded of this worker: %s", self._name, refused)

    def _remind(self) -> None:
        while not self._ended.wait(REMIND_SECONDS):
            try:
                self._find(self._name, time.monotonic() + REMIND_SECONDS)
            except NotAsked as error:
                logger.debug("%s: the store does not answer: %s", self._name, error)

    def end(self) -> None:
        """Ask no more. A question that is open ends by itself."""
        self._ended.set()


class _Question:
    def __init__(self, key: str | int) -> None:
        self.key = key
        self.bell = Bell()
        self.answer: Worker | None = None
        self.error: Exception | None = None


class Lookup:
    """Finds workers by name or id. Thread-safe.

    A thread asks one question after the other. If the store does not answer it for long, another
    thread connects to the store anew and asks all that is open; what the first one hears after that
    does not count.

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
        self._lock = threading.Lock()  # guards what follows
        self._questions: dict[str | int, _Question] = {}  # that are open
        self._connection = 0  # its number
        self._asked_at = 0.0  # when the question was asked by it that has no answer yet; 0: none
        self._stuck = 0
        self._threads = self._new_thread()

    def _new_thread(self) -> BriefThreads:
        # One, since a client of a store takes one operation after the other.
        return BriefThreads(f"farcall-find-{self._name}", 1)

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
            uninterrupted(self._ask_anew_if_stuck, f"farcall-ask-{self._name}")
        if question.error is not None:
            raise NotAsked(str(question.error).partition("\n")[0]) from question.error
        return question.answer

    def _question(self, key: str | int) -> _Question:
        """The question about this key that is open, or a new one."""
        self._ask_anew_if_stuck()
        with self._lock:
            known = self._questions.get(key)
            if known is not None:
                return known
            question = self._questions[key] = _Question(key)
            threads, connection = self._threads, self._connection
        threads.run(partial(self._answer, question, connection))
        return question

    def _ask_anew_if_stuck(self) -> None:
        with self._lock:
            waits = time.monotonic() - self._asked_at
            if not self._asked_at or waits < STUCK_SECONDS or self._stuck == MOST_STUCK:
                return
            self._stuck += 1
            self._asked_at = 0.0
            self._connection += 1
            threads = self._threads = self._new_thread()
            again = list(self._questions.values())
            connection = self._connection
        logger.debug("%s: the store has not answered for %.0f s", self._name, waits)
        for question in again:
            threads.run(partial(self._answer, question, connection, is_new=question is again[0]))

    def _answer(self, question: _Question, connection: int, *, is_new: bool = False) -> None:
        """Ask the store.

        Args:
            connection: by which; nothing is asked any more if it is not the latest.
            is_new: it is to be made first.
        """
        with self._lock:
            if connection != self._connection:
                return
            self._asked_at = time.monotonic()
        answer: Worker | None = None
        failure: Exception | None = None
        try:
            if is_new:
                self._reopen()
            answer = self._ask_twice(question.key)
        except Exception as error:
            failure = error
        with self._lock:
            if connection != self._connection:
                self._stuck -= 1
                return
            self._asked_at = 0.0
            question.answer, question.error = answer, failure
            del self._questions[question.key]
        question.bell.ring()

    def _ask_twice(self, key: str | int) -> Worker | None:
        try:
            return self._ask(key)
        except RuntimeError as error:
            logger.debug("%s: the store is gone: %s", self._name, error)
        self._reopen()
        return self._ask(key)
