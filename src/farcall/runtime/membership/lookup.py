"""Asks the rendezvous where workers are. A store may answer late or never, or be gone for a while.
So a separate thread asks, and no caller waits beyond its deadline. Rules: `protocol/lookup.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from farcall.ids import Worker
from farcall.log import get_logger
from farcall.protocol.lookup import REMIND_SECONDS, LookupMachine, Step
from farcall.runtime.threads.bell import Bell
from farcall.threads import FarcallThread
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.uninterrupted import uninterrupted

logger = get_logger("farcall")

RENEW_SECONDS = 1.0  # between two looks at whether there is a new certificate
LOOKUP_SECONDS = 60.0  # for a rendezvous, where no call says how long
LOOK_AGAIN = 1.0  # seconds between looks at what a bell should have told

EVERYBODY = -1  # the key of the question who is there; no worker has such an id

Answer = Worker | Sequence[Worker] | None
Ask = Callable[[str | int], Answer]


class NotAsked(Exception):
    """The store could not be asked. The message says why."""


class StoreIsLate(NotAsked):
    """The store has not answered by the deadline. It still may."""


class Reminder:
    """Asks for this worker's own name now and then.

    A worker that asks nothing would not notice that the store was started again, and has forgotten
    it. Newcomers could not find it.

    Args:
        name: of this worker.
        find: see `Lookup.find`.
        is_outdated: of a worker that may get a new certificate: whether the store is to be asked
            at once, see `Rendezvous.is_outdated`.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[str, float], object],
        is_outdated: Callable[[], bool] | None,
    ) -> None:
        self._name = name
        self._find = find
        self._is_outdated = is_outdated
        self._ended = threading.Event()
        self._thread = FarcallThread(self._remind, f"farcall-remind-{name}")

    def start(self) -> None:
        """Begin. If the system has no thread for that, only this worker's own questions remind."""
        refused = self._thread.try_start()
        if refused is not None:
            logger.debug("%s: the store is not reminded of this worker: %s", self._name, refused)

    def _remind(self) -> None:
        while self._is_time():
            try:
                self._find(self._name, time.monotonic() + REMIND_SECONDS)
            except NotAsked as error:
                logger.debug("%s: the store does not answer: %s", self._name, error)

    def _is_time(self) -> bool:
        """Wait until it is time to ask again, then return True; False when this has ended."""
        if self._is_outdated is None:
            return not self._ended.wait(REMIND_SECONDS)
        until = time.monotonic() + REMIND_SECONDS
        while not self._ended.wait(RENEW_SECONDS):
            if time.monotonic() >= until or self._is_outdated():
                return True
        return False

    def end(self) -> None:
        """Ask no more. A question that is open ends by itself."""
        self._ended.set()


class _Question:
    def __init__(self, key: str | int) -> None:
        self.key = key
        self.began = time.monotonic()
        self.bell = Bell()
        self.answer: Answer = None
        self.error: Exception | None = None


class Lookup:
    """Finds workers by name or id. Thread-safe.

    A thread asks one question after the other. If the store does not answer it for long, another
    thread connects to the store anew and asks all that is open; answers to the first one after that
    don't count.

    Args:
        name: of this worker.
        ask: asks the store for the worker with a name or id, or for all (`EVERYBODY`), and may take
            any time. Raises RuntimeError, as torch's stores do, if
            the store is gone.
        reopen: connects to the store again. Raises RuntimeError or OSError if that fails.
    """

    def __init__(self, name: str, ask: Ask, reopen: Callable[[], None]) -> None:
        self._name = name
        self._ask = ask
        self._reopen = reopen
        self._lock = threading.Lock()  # guards what follows
        self._machine: LookupMachine[_Question] = LookupMachine()
        self._threads = self._new_thread()

    def _new_thread(self) -> BriefThreads:
        # One, since a client of a store takes one operation after the other.
        return BriefThreads(f"farcall-find-{self._name}", 1)

    def find(self, key: str | int, deadline: float) -> Worker | None:
        """Return the live worker of this name or id, or None if there is none.

        Args:
            deadline: `time.monotonic()` seconds.

        Raises:
            NotAsked: the store is gone, or has not answered by the deadline.
        """
        answer = self._answer_to(key, deadline)
        assert answer is None or isinstance(answer, Worker)
        return answer

    def everybody(self, deadline: float) -> Sequence[Worker]:
        """Return the workers that are there. Arguments and errors as for `find`."""
        answer = self._answer_to(EVERYBODY, deadline)
        assert isinstance(answer, Sequence)
        return answer

    def _answer_to(self, key: str | int, deadline: float) -> Answer:
        question = uninterrupted(partial(self._question, key), f"farcall-ask-{self._name}")
        while not question.bell.wait(max(0.0, min(deadline - time.monotonic(), LOOK_AGAIN))):
            if time.monotonic() >= deadline:
                raise StoreIsLate("it has not answered in time")
            uninterrupted(self._look, f"farcall-ask-{self._name}")
        if question.error is not None:
            raise NotAsked(str(question.error).partition("\n")[0]) from question.error
        return question.answer

    def _question(self, key: str | int) -> _Question:
        """Return the question about this key that is open, or a new one."""
        self._look()
        with self._lock:
            question, connection = self._machine.ask(_Question(key))
            threads = self._threads
        if connection is not None:
            threads.run(partial(self._answer, question, connection))
        return question

    def _look(self) -> None:
        """Ask all anew, by another thread, if the store does not answer this one."""
        with self._lock:
            anew = self._machine.look(time.monotonic())
            if anew is None:
                return
            threads = self._threads = self._new_thread()
        logger.debug("%s: the store does not answer, and is asked anew", self._name)
        for question in anew.questions:
            threads.run(partial(self._answer, question, anew.connection))

    def _answer(self, question: _Question, connection: int) -> None:
        """Ask the store by a connection, if that is the latest."""
        is_over = False
        while not is_over:
            with self._lock:
                step = self._machine.begins(question, connection, time.monotonic())
            if step is Step.DROP:
                return
            answer: Answer = None
            failure: Exception | None = None
            try:
                answer = self._ask_store(question.key, reopen=step is Step.REOPEN)
            except Exception as error:
                failure = error
            # Of all workers it is never said that all are found: see LOOK-6.
            found = None if failure is not None else isinstance(answer, Worker)
            with self._lock:
                is_over = self._machine.ends(question, connection, found=found)
                if is_over:
                    question.answer, question.error = answer, failure
        question.bell.ring()

    def _ask_store(self, key: str | int, *, reopen: bool) -> Answer:
        if not reopen:
            try:
                return self._ask(key)
            except RuntimeError as error:
                logger.debug("%s: the store is gone: %s", self._name, error)
        self._reopen()
        return self._ask(key)
