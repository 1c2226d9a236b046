"""Keep the known workers: by name, id and incarnation, in which meeting, and for how long.

The standing of a key (a name, an id, a `WorkerInfo`):

    the holder of the key       the store can be asked  standing
    --------------------------  ----------------------  ---------------------
    lives, as far as is known   -                       KNOWN
    is lost, or there is none   yes                     ASK, and then as below
    is lost                     no, or it was asked     LOST
    there is none               no, or it was asked     UNKNOWN

The verdict on a handshake in a meeting (`verdict`):

    the worker is here         the meeting is                    verdict
    -------------------------  --------------------------------  --------------------------------
    lost, after its goodbye    any                               LEFT
    living, lost, or unknown   before the present, or next, one  GIVEN_UP
    living, lost, or unknown   the last that there can be        TOO_OFTEN
    living, lost, or unknown   the present one                   WELCOME
    living, lost, or unknown   any later one                     ANEW: lose it, and `meet_again`

Invariants:

DIR-1  Names: a key belongs to the worker for which the store has last given it. Messages of workers
       about themselves and each other take no key from a living worker. No lost worker has a key
       that a living, known worker could have.
DIR-2  Agreement: in a handshake each worker says the number of a meeting, and the greater number
       counts. If a handshake ends well and no link ends afterwards, both workers are in the same
       meeting, and neither is lost to the other. That holds even if both dial at once, or have
       forgotten each other.
DIR-3  One meeting: a worker that is lost is never alive again in the meeting that ended, nor in an
       earlier one. A late message of an earlier meeting finds a lost worker, or none.
DIR-4  Doubt: "there is none" is said only if the store has said so, or if it is never asked.
DIR-5  Bounds: the tables hold the workers that are not lost. In a group that workers join and
       leave, they also hold the workers that were lost within `DISCARD_SECONDS` of the last loss;
       in a group of fixed size, the lost workers of the last meetings, whose places stay free. The
       number of the next meeting with a worker outlives the record of the last meeting by
       `DISCARD_SECONDS`.
DIR-6  Discarding: a lost incarnation leaves this directory after `DISCARD_SECONDS`. After
       `DISCARD_SECONDS` more it is discarded everywhere, once: by then every message about it from
       the time when it was known has been handled.
DIR-7  News: for each name, the news that a worker with this name is here and the news that this
       worker is gone take turns. While a living worker has a name, the last news of that name is
       that this worker is here.

The machine is pure. Only `of_incarnation`, `known` and `newest` are thread-safe: the owner of a
directory holds a lock around the other methods. Times are seconds on any one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from farcall.ids import (
    MAX_MEETINGS,
    MET_AGAIN,
    Member,
    Worker,
    WorkerInfo,
    meeting_of,
    next_incarnation,
    nth_incarnation,
    original,
)

DISCARD_SECONDS = 600.0  # after which a lost worker is discarded, where workers come and go

Key = str | int | WorkerInfo
KEY_TYPES = frozenset((str, int, WorkerInfo, Member))  # not bool: True would be found as worker 1


class Party(Protocol):
    """An incarnation of a worker, as its owner keeps it.

    Attributes:
        worker: with the incarnation that it has here, which never changes.
        loss_cause: why it is lost; None if it is not. The owner sets it, and calls
            `on_peer_lost` then.
        left: its goodbye, if it has said one.
    """

    worker: Worker
    loss_cause: str | None
    left: str | None


P = TypeVar("P", bound=Party)


class Standing(Enum):
    """The standing of a key; see the table."""

    KNOWN = auto()
    LOST = auto()
    ASK = auto()
    UNKNOWN = auto()


class Verdict(Enum):
    """The verdict on a handshake; see the table."""

    WELCOME = auto()
    ANEW = auto()
    LEFT = auto()
    GIVEN_UP = auto()
    TOO_OFTEN = auto()


class Found(NamedTuple, Generic[P]):
    """The standing of a key, and the worker that has it, lost or not."""

    standing: Standing
    party: P | None


class News(NamedTuple, Generic[P]):
    """A worker is here, or is gone."""

    party: P
    is_here: bool


class DirectoryMachine(Generic[P]):
    """The directory of one worker.

    Args:
        make: makes the record of a worker that is new here.
        is_open: workers come and go, and the store can be asked for them.

    Attributes:
        of_incarnation: the record of an incarnation, or None.
        news: changes that no listener knows yet, in order; see DIR-7. The owner takes them out.
    """

    def __init__(self, make: Callable[[Worker], P], *, is_open: bool) -> None:
        self._make = make
        self.is_open = is_open
        self._by_incarnation: dict[int, P] = {}
        self._by_key: dict[object, P] = {}
        self._met_again: dict[int, int] = {}  # by the original incarnation: that of now
        self._lost_parties: deque[tuple[float, P]] = deque()  # each with when that was
        self._discarded: deque[tuple[float, int]] = deque()
        self._present: dict[str, P] = {}  # by name: the parties here, by the news
        self.news: deque[News[P]] = deque()
        # Of each message: without a step of Python.
        self.of_incarnation: Callable[[int], P | None] = self._by_incarnation.get

    # Questions.

    def known(self, to: object) -> P | None:
        """Return the worker of that name, id or info, if it is known here and not lost."""
        party = self._by_key.get(to) if type(to) in KEY_TYPES else None
        return party if party is not None and party.loss_cause is None else None

    def resolve(self, to: Key, *, asked: bool = False) -> Found[P]:
        """Return what a key stands for.

        Args:
            to: the key.
            asked: the store was asked for it, and what it said was added.
        """
        party = self._by_key.get(to)
        if party is not None and party.loss_cause is None:
            return Found(Standing.KNOWN, party)
        if self.is_open and not asked:
            return Found(Standing.ASK, party)
        return Found(Standing.UNKNOWN if party is None else Standing.LOST, party)

    def holder(self, to: Key) -> P | None:
        """Return the worker that has a key, lost or not."""
        return self._by_key.get(to)

    def is_current(self, party: P) -> bool:
        """Return whether a worker is known, and its name belongs to no other that lives."""
        for other in reversed(self.parties()):
            if other is party:
                return True
            if other.loss_cause is None and other.worker.name == party.worker.name:
                return False  # it was learnt later
        return False

    def newest(self, incarnation: int) -> P | None:
        """Return what a worker is here now, or was last, by its original incarnation."""
        return self._by_incarnation.get(self._met_again.get(incarnation, incarnation))

    def meeting(self, incarnation: int) -> int:
        """Return which meeting with a worker is the present one, or the next if it is lost."""
        now = self._met_again.get(incarnation, incarnation)
        party = self._by_incarnation.get(now)
        return meeting_of(now) + (party is not None and party.loss_cause is not None)

    def parties(self) -> list[P]:
        """Return every incarnation that was met and is not discarded."""
        return list(self._by_incarnation.values())

    def present(self) -> list[P]:
        """Return the workers that are here, as the news says."""
        return list(self._present.values())

    def verdict(self, incarnation: int, meeting: int) -> Verdict:
        """Return what a handshake in a meeting means; `incarnation` is the original one."""
        party = self.newest(incarnation)
        if party is not None and party.loss_cause is not None and party.left is not None:
            return Verdict.LEFT
        if meeting < self.meeting(incarnation):
            return Verdict.GIVEN_UP
        if meeting >= MAX_MEETINGS:
            return Verdict.TOO_OFTEN
        if meeting == meeting_of(self._met_again.get(incarnation, incarnation)):
            return Verdict.WELCOME
        return Verdict.ANEW

    # Events.

    def add(self, worker: Worker) -> P:
        """Learn of a worker, or more about one. A new incarnation takes its name over.

        Args:
            worker: with its original incarnation, as in the store.
        """
        return self._know(self._as_met(worker), takes_keys=True)

    def told(self, worker: Worker) -> P:
        """Learn of a worker from another one. It takes no key from one that lives.

        Args:
            worker: with its original incarnation.
        """
        return self._know(self._as_met(worker), takes_keys=False)

    def _as_met(self, worker: Worker) -> Worker:
        now = self._met_again.get(worker.incarnation)
        return worker if now is None else msgspec.structs.replace(worker, incarnation=now)

    def heard(self, worker: Worker) -> P | None:
        """Return the sender of what a link brings, or None if it is of an earlier meeting.

        Its own statements take no key from a worker that lives.

        Args:
            worker: with the incarnation that it has here by that link.
        """
        begun = original(worker.incarnation)
        if worker.incarnation < self._met_again.get(begun, begun):
            return None
        if meeting_of(worker.incarnation):  # the number may have been discarded meanwhile
            self._met_again[begun] = worker.incarnation
        return self._know(worker, takes_keys=False)

    def _know(self, worker: Worker, *, takes_keys: bool) -> P:
        party = self._by_incarnation.get(worker.incarnation)
        if party is None:
            party = self._by_incarnation[worker.incarnation] = self._make(worker)
        elif (worker.pid and not party.worker.pid) or (
            worker.addresses and not party.worker.addresses
        ):  # until now it was known from its hello, which says less
            party.worker = worker
        for key in (worker.name, worker.id, worker.info):
            holder = self._by_key.get(key)
            is_free = holder is None or holder.loss_cause is not None
            if holder is None or (party.loss_cause is None and (takes_keys or is_free)):
                self._by_key[key] = party
        self._tell_of(worker.name)
        return party

    def _tell_of(self, name: str) -> None:
        """Put a change of a name into the news."""
        holder, before = self._by_key.get(name), self._present.get(name)
        now = None if holder is None or holder.loss_cause is not None else holder
        if now is before:
            return
        if before is not None:
            self.news.append(News(self._present.pop(name), is_here=False))
        if now is not None:
            self._present[name] = now
            self.news.append(News(now, is_here=True))

    def meet_again(self, incarnation: int, meeting: int, now: float) -> bool:
        """Hear that a worker which is lost, or was discarded, is here again.

        Args:
            incarnation: its original one.
            meeting: the number of the meeting.
            now: the time.

        Returns:
            Whether it was lost before, and that is news here.
        """
        last = self._met_again.get(incarnation, incarnation)
        again = nth_incarnation(incarnation, meeting)
        if last >= again:
            return False  # another thread was faster
        self._met_again[incarnation] = again
        old = self._by_incarnation.get(last)
        if old is None:  # the number is kept until there is a link, or for as long as others are
            self._discarded.append((now, again - MET_AGAIN))
            return False
        if not self.is_open:
            self._lost_parties.append((now, old))
        self._know(msgspec.structs.replace(old.worker, incarnation=again), takes_keys=False)
        return True

    def on_peer_lost(self, party: P, now: float) -> list[int]:
        """Hear that a worker is lost. Its keys go to those that live and have them, too.

        Where workers come and go those that are gone would fill the memory, and anywhere records
        of meetings before the last one would. So a loss is when the long lost are discarded.

        Returns:
            The incarnations that are to be discarded everywhere now.
        """
        self._pass_keys_on(party)
        self._tell_of(party.worker.name)
        if self.is_open:  # else no worker takes their places
            self._lost_parties.append((now, party))
        before = now - DISCARD_SECONDS
        while self._lost_parties and self._lost_parties[0][0] < before:
            self._drop(self._lost_parties.popleft()[1], now)
        gone = []
        while self._discarded and self._discarded[0][0] < before:
            incarnation = self._discarded.popleft()[1]
            gone.append(incarnation)
            begun, again = original(incarnation), next_incarnation(incarnation)
            if self._met_again.get(begun) == again and again not in self._by_incarnation:
                del self._met_again[begun]
        return gone

    def _pass_keys_on(self, party: P) -> None:
        """Give the keys of a lost worker to others, of whom it was heard before its last word."""
        for key in (party.worker.name, party.worker.id, party.worker.info):
            if self._by_key.get(key) is party:
                for other in self._by_incarnation.values():
                    worker = other.worker
                    if other.loss_cause is None and key in (worker.name, worker.id, worker.info):
                        self._by_key[key] = other

    def _drop(self, old: P, now: float) -> None:
        """Discard one that is lost, but for the number of the next meeting with it."""
        incarnation = old.worker.incarnation
        self._by_incarnation.pop(incarnation, None)
        begun = original(incarnation)
        if self._met_again.get(begun, begun) == incarnation:
            self._met_again[begun] = next_incarnation(incarnation)  # others know longer of the loss
        for key in [key for key, known in self._by_key.items() if known is old]:
            del self._by_key[key]
        self._discarded.append((now, incarnation))
