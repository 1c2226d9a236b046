"""Decide which questions to the store are open, which connection asks them, which answers count.

A connection takes one question after the other, in order. If it does not answer, another connection
is made, and asks all open questions.

    event                     the connection is the latest         it is an older one
    ------------------------  -----------------------------------  ----------------------------
    begins with a question    ASK, or REOPEN (see LOOK-5)          DROP
    ends: found, failed       the question is closed               does not count; one stuck less
    ends: there is none       the same, but for LOOK-6             does not count; one stuck less

Invariants:

LOOK-1  One at a time: a caller whose question is asked already waits for the same answer.
LOOK-2  The latest counts: an answer by a connection counts only if there is no later connection.
LOOK-3  Few are stuck: at most `MOST_STUCK` connections that were given up have not ended yet.
LOOK-4  Persistence: if the latest connection has not answered for `STUCK_SECONDS`, the next event
        makes another one (within LOOK-3), which asks all open questions anew. Each connection has
        twice as long as the one before, up to `MOST_PATIENCE` times `STUCK_SECONDS`, until one
        answers: a store may be slow.
LOOK-5  Made again: after a failure the connection is made anew before the next question, so that a
        store that was started again, and is empty, learns of this worker.
LOOK-6  Freshness: "there is none" counts for the callers that came before the store was asked. If
        another caller came since, the store is asked again: the worker may be there by now.

The machine is pure, and not thread-safe: its owner holds a lock around each method. Times are
seconds on any one monotonic clock.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, NamedTuple, Protocol, TypeVar

STUCK_SECONDS = 5.0  # for an answer; then the connection to the store may lead nowhere
MOST_PATIENCE = 8
MOST_STUCK = 2  # connections that wait for such answers
REMIND_SECONDS = 20.0  # between two questions for a worker's own name


class Query(Protocol):
    """A question.

    Attributes:
        key: the name or id that is asked for.
    """

    key: str | int


Q = TypeVar("Q", bound=Query)


class Step(Enum):
    """A step of a connection for a question whose turn it is."""

    ASK = auto()
    REOPEN = auto()  # make the connection, then ask
    DROP = auto()


class Round(NamedTuple, Generic[Q]):
    """Ask these questions, in order, by the connection with this number."""

    connection: int
    questions: list[Q]


class LookupMachine(Generic[Q]):
    """The questions of one worker."""

    def __init__(self) -> None:
        self._open: dict[str | int, Q] = {}
        self._connection = 0  # the number of the latest
        self._is_made = True
        self._asked_at: float | None = None  # when the question was asked that has no answer yet
        self._asked: Q | None = None  # that question
        self._is_joined = False  # a caller has come since then
        self._patience = 1
        self._stuck = 0

    def ask(self, question: Q) -> tuple[Q, int | None]:
        """Hear that a caller has a question.

        Returns:
            The open question of this key, to wait for. If it is this one, the connection by which
            it is to be asked.
        """
        known = self._open.setdefault(question.key, question)
        if known is self._asked:
            self._is_joined = True
        return known, self._connection if known is question else None

    def look(self, now: float) -> Round[Q] | None:
        """Return what another connection is to ask, if it is time. Callers that wait look."""
        if self._asked_at is None or now - self._asked_at < STUCK_SECONDS * self._patience:
            return None
        if self._stuck == MOST_STUCK:
            return None
        self._stuck += 1
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._asked_at = self._asked = None
        self._connection += 1
        self._is_made = False
        return Round(self._connection, list(self._open.values()))

    def begins(self, question: Q, connection: int, now: float) -> Step:
        """Hear that a connection is about to take a question."""
        if connection != self._connection:
            return Step.DROP
        self._asked, self._is_joined = question, False
        self._asked_at = now
        return Step.ASK if self._is_made else Step.REOPEN

    def ends(self, question: Q, connection: int, *, found: bool | None) -> bool:
        """Hear that a connection has an answer, or has failed.

        Args:
            found: whether there is such a worker; None if it has failed.

        Returns:
            Whether that counts. If not, it takes the question again: see `begins`.
        """
        if connection != self._connection:
            self._stuck -= 1
            return False
        self._asked_at = self._asked = None
        self._is_made = found is not None
        if found is not None:
            self._patience = 1
        if found is False and self._is_joined:
            return False
        del self._open[question.key]
        return True
