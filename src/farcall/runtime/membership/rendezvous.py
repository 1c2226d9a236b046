"""The rendezvous: workers find each other at a torch Store.

A `Rendezvous` reads and writes records under one prefix of a store (TCPStore, FileStore and
HashStore alike). It opens no connection to a worker and keeps nothing: what it knows is in the
store. Under the prefix are

    name/<name>, rank/<id>   the record of the worker that has this name, this id: up or left
    members, member/<n>      the log of all names there ever were, in order
    next_id                  counter for workers that come without a rank
    joined                   counter of those that have joined a group whose workers come and go,
                             and of records that were signed anew: both change who is there
    confirmed/<id>, gate     of a group of fixed size: see `fixed_group.py`
    board                    see `signed_store.py`, also for which of these are signed

Records are taken over with compare-and-set, so two workers that want one name can't both win.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy

import msgspec
from torch.distributed import (  # type: ignore[attr-defined]  # as in stores.py
    FileStore,
    PrefixStore,
    Store,
)

from farcall.errors import DuplicateWorker, RendezvousError, RendezvousTimeout
from farcall.ids import Worker, is_name
from farcall.log import get_logger
from farcall.runtime.membership.fixed_group import FixedGroup
from farcall.runtime.membership.hosts import host_name
from farcall.runtime.membership.lookup import EVERYBODY, Answer
from farcall.runtime.membership.records import MAX_ID, RECORD, Record
from farcall.runtime.membership.signed_store import MOST_TRIES, SignedStore, StoreFailed
from farcall.runtime.membership.signing import Signer, Unsigned
from farcall.runtime.membership.stores import bounded, open_store, reopened

__all__ = ["Rendezvous", "open_store", "store_errors"]

_log = get_logger(__name__)

# The time that leaving may take, in seconds, when the store's host has vanished without closing.
_LEAVE_LIMIT = 5.0


# How long, in seconds, a record that is not believed may take to be signed with a new certificate,
# and how long to wait before it is looked at again. Longer than RENEW_SECONDS of `lookup.py`, and
# shorter than what a store may take to answer a question.
_RENEWAL_LIMIT, _RENEWAL_PAUSE = 4.0, 0.2

_MOST_EMPTY = 1024  # entries of the log in a row that lead to no new record


def _nobody_is_dead(worker: Worker) -> bool:
    return False


class Rendezvous:
    """The meeting place of one group of workers.

    A group of fixed size uses a prefix once: the next `init_rpc` needs another one. Methods may be
    called from any thread.

    Args:
        store: where to meet.
        prefix: tells this group from others at the same store.
        signer: of the group. By default nothing is signed.
    """

    def __init__(self, store: Store, prefix: str, signer: Signer | None = None) -> None:
        self._signer = signer or Unsigned()
        self._board = SignedStore(PrefixStore(prefix, store), prefix, self._signer)
        self._signed_with = self._signer.credential()
        # Up to when records that are not believed are waited for: once, not at each question.
        self._claimed_until: dict[str | int, float] = {}
        self._is_file = isinstance(store, FileStore)
        self._given_up = threading.Event()
        self._roll: tuple[int | None, list[Worker]] | None = None  # of when so many had joined

    def join(
        self,
        worker: Worker,
        world_size: int | None,
        timeout: float,
        *,
        is_dead: Callable[[Worker], bool] = _nobody_is_dead,
    ) -> list[Worker]:
        """Register a worker and learn who else is there. Blocks the calling thread.

        Args:
            worker: the joining one. In a group without a fixed size its id may be -1: it then gets
                the id that it had before, or the next free one; find it in the result by name.
            world_size: wait until ranks 0 to world_size - 1 are there; None: don't wait.
            timeout: seconds to wait for the others; 0 for no limit.
            is_dead: asked about the worker that has the name or id now, when it has not left;
                True lets this one take its place. Peers that notice a death may `leave` for it.

        Returns:
            With a world size, all workers by rank; else those that are up now, this one included,
            in the order in which their names first came.

        Raises:
            ValueError: the id is not a rank of a group of that size.
            DuplicateWorker: another live worker has the name or the id. Ends the wait of a group
                of fixed size, for all.
            RendezvousTimeout: a worker is missing; says which.
            RendezvousError: another worker of the group failed, or the store is gone.
        """
        if world_size is not None and not 0 <= worker.id < world_size:
            raise ValueError(f"rank {worker.id} of {worker.name!r} is not in 0..{world_size - 1}")
        deadline = time.monotonic() + timeout if timeout else math.inf
        with store_errors(worker.name):
            try:
                me = self._register(worker, is_dead)
            except DuplicateWorker as error:
                if world_size is not None:
                    FixedGroup(self._board, worker, world_size).abort(str(error))
                raise
            if world_size is not None:
                group = FixedGroup(self._board, worker, world_size)
                return group.wait(timeout, deadline, self._given_up)
            self._board.add("joined", 1)
            others = self.workers(deadline)
            if me in others:
                return others
            return [other for other in others if other.name != me.name and other.id != me.id] + [me]

    def give_up(self) -> None:
        """End a wait in `join` of another thread soon: it raises RendezvousError."""
        self._given_up.set()

    def find(self, name_or_id: str | int) -> Worker | None:
        """Ask the store for the live worker of this name or id; return None if there is none.

        Raises:
            RuntimeError: the store is gone.
        """
        if isinstance(name_or_id, str):
            record = self._read(f"name/{name_or_id}")
            is_up = record is not None and record.state == "up"
            return record.worker if record and is_up and record.worker.name == name_or_id else None
        record = self._read(f"rank/{name_or_id}")
        if record is None:
            return None
        # The name decides: one that came back under another id has left its old one behind.
        worker = self.find(record.worker.name)
        return worker if worker is not None and worker.id == name_or_id else None

    def reopen(self, worker: Worker) -> None:
        """Connect to the store again, which is gone or was. One that lost everything learns anew.

        Args:
            worker: this one, which has joined.

        Raises:
            RuntimeError, OSError: there is no store any more.
        """
        anew = copy(self)
        anew._roll = None
        anew._board = self._board.at(reopened(self._board.store))
        name = f"name/{worker.name}"
        if not anew._board.are_there([name]) or anew._read(name) is None:
            anew._register_again(worker)
        # Only now: other threads ask by it, and would find nothing amiss at a store that was
        # started again and breaks before this worker is known there.
        self._board, self._roll = anew._board, None

    def roll(self) -> list[Worker]:
        """Return all workers that are up; some may have left since this was last asked.

        Cheap if no worker has joined, or signed anew, since then.

        Raises:
            RuntimeError: the store is gone.
        """
        joined, roll = self._board.counted("joined"), self._roll
        if roll is None or roll[0] != joined:
            roll = self._roll = joined, self.workers()
        return roll[1]

    def ask(self, me: Worker, name_or_id: str | int) -> Answer:
        """Ask as `find` or `roll` for a joined worker. A worker that asks for itself signs anew.

        It does so if `is_outdated`. A record that is not believed, of another worker with a
        certificate, may be signed anew soon: this waits for it, a few seconds at most.

        Raises:
            RuntimeError: the store is gone.
        """
        if name_or_id == EVERYBODY:
            return self.roll()
        if name_or_id == me.name:
            if self.is_outdated():
                self._sign_again(me)
            return self.find(name_or_id)
        found = self.find(name_or_id)
        while found is None and self._signed_with:  # secrets are not renewed
            may_come = self._may_be_signed_anew(name_or_id)
            found = self.find(name_or_id)  # the record may have been signed just before that look
            if not may_come:
                break
            if found is None:
                self._given_up.wait(_RENEWAL_PAUSE)
        if found is not None:
            self._claimed_until.pop(name_or_id, None)
        return found

    def is_outdated(self) -> bool:
        """Return whether this worker's certificate is another one than what signed its records.

        When that one has expired, or its authority has gone, they are not believed any more.
        """
        return self._signer.credential() != self._signed_with

    def _may_be_signed_anew(self, name_or_id: str | int) -> bool:
        """Return whether a worker is up by a record that is not believed, for a while only."""
        kind = "name" if isinstance(name_or_id, str) else "rank"
        claim = self._board.read(f"{kind}/{name_or_id}", RECORD).claim
        if claim is None or claim.state != "up":
            return False
        now = time.monotonic()
        return now < self._claimed_until.setdefault(name_or_id, now + _RENEWAL_LIMIT)

    def _sign_again(self, worker: Worker) -> None:
        credential = self._signer.credential()
        record, is_there = Record(worker), False
        for key in (f"name/{worker.name}", f"rank/{worker.id}"):
            found = self._board.read(key, RECORD)
            if record in (found.value, found.claim):
                self._board.write(key, found.raw, RECORD, record)
                is_there = True
        if is_there:  # else newcomers that did not believe the records keep their list without it
            self._board.add("joined", 1)
        self._signed_with = credential

    def workers(self, deadline: float = math.inf) -> list[Worker]:
        """Return the workers that are up now, in the order in which their names first came.

        Args:
            deadline: `time.monotonic()` seconds, after which those found until then are returned.

        Raises:
            RuntimeError: the store is gone.
        """
        return [record.worker for record in self._listed(deadline) if record.state == "up"]

    def _listed(self, deadline: float) -> Iterator[Record]:
        """Yield the records of all in the log, which a hostile store may make without end."""
        names: set[str] = set()  # of those that have a record
        empty = 0
        for number in range(1, (self._board.counted("members") or 0) + 1):
            if empty > _MOST_EMPTY or time.monotonic() >= deadline:
                return
            # A worker that is just joining may have counted itself without having written its name.
            name = self._board.text(f"member/{number}")
            is_new = is_name(name) and name not in names
            record = self._read(f"name/{name}") if is_new else None
            if record is None or record.worker.name != name:
                empty += 1
                continue
            names.add(name)
            empty = 0
            yield record

    def leave(self, worker: Worker) -> None:
        """Mark a worker, this one or one known to be dead, as gone; its name is free again.

        Does nothing when the name or id has passed to another incarnation, or when the store is
        gone: the last worker to leave can't rely on it. Blocks for at most a few seconds.
        """

        def mark() -> None:
            for key in (f"name/{worker.name}", f"rank/{worker.id}"):
                self._mark_left(key, worker)

        try:
            bounded(mark, _LEAVE_LIMIT, RendezvousTimeout("the store does not answer"))
        except RuntimeError as error:
            _log.debug("%r could not say that it leaves: %s", worker.name, error)

    def _register(self, worker: Worker, is_dead: Callable[[Worker], bool]) -> Worker:
        """Take the worker's name and id, and return it with that id."""
        before = self._read(f"name/{worker.name}")
        if before is None:
            # Before the record: a death in between leaves a name without record, which is skipped;
            # the other way round it would leave a worker that is in no list.
            self._log_name(worker.name)
        for number in self._ids(worker, before):
            candidate = msgspec.structs.replace(worker, id=number)
            holder = self._claim(f"name/{worker.name}", candidate, is_dead)
            if holder is not None:
                raise self._duplicate(f"the name {worker.name!r}", holder, candidate)
            holder = self._claim(f"rank/{number}", candidate, is_dead)
            if holder is None:
                return candidate
            self._mark_left(f"name/{worker.name}", candidate)
            if worker.id >= 0:
                raise self._duplicate(f"the rank {number}", holder, candidate)
        raise StoreFailed("its counter of ids does not count")

    def _register_again(self, worker: Worker) -> None:
        """Register at a store that was started again, where newcomers may have ids of ours."""
        self._log_name(worker.name)
        holder = self._claim(f"name/{worker.name}", worker, _nobody_is_dead)
        if holder is not None:
            _log.warning("%r can't be found any more: %s", worker.name, _describe(holder))
            return
        holder = self._claim(f"rank/{worker.id}", worker, _nobody_is_dead)
        if holder is not None:
            _log.warning(
                "%r and %r both have the id %d, since the store of the group was started again",
                worker.name,
                holder.name,
                worker.id,
            )
        self._board.add("joined", 1)
        missing = worker.id + 1 - self._board.add("next_id", 0)
        if missing > 0:
            self._board.add("next_id", missing)

    def _log_name(self, name: str) -> None:
        self._board.put_text(f"member/{self._board.add('members', 1)}", name)

    def _ids(self, worker: Worker, before: Record | None) -> Iterator[int]:
        """Yield the ids to try: the worker's own, or its former one and then ever new ones."""
        if worker.id >= 0:
            yield worker.id
            return
        if before is not None:
            yield before.worker.id
        last = -1
        # Ids that are taken are as many as there are records. A counter that lies gives no new one.
        while last < (number := self._board.add("next_id", 1) - 1) <= MAX_ID:
            yield number
            last = number

    def _claim(self, key: str, worker: Worker, is_dead: Callable[[Worker], bool]) -> Worker | None:
        """Write the worker's record, unless a live worker has the key: then that worker."""
        wanted = Record(worker)
        expected = b""  # for the stores: there is nothing yet
        for _ in range(MOST_TRIES):
            found = self._board.write(key, expected, RECORD, wanted)
            if found.value == wanted:
                return None
            if found.value is not None:
                holder = found.value.worker
                if found.value.state == "up" and not is_dead(holder):
                    return holder
            expected = found.raw
        raise StoreFailed("it does not keep written values")

    def _mark_left(self, key: str, worker: Worker) -> None:
        found = self._board.read(key, RECORD)
        record = found.value
        if record is not None and record.worker.incarnation == worker.incarnation:
            self._board.write(key, found.raw, RECORD, Record(record.worker, "left"))

    def _read(self, key: str) -> Record | None:
        return self._board.read(key, RECORD).value

    def _duplicate(self, what: str, first: Worker, second: Worker) -> DuplicateWorker:
        message = (
            f"{what} is not unique: {_describe(first)} has it, {_describe(second)} wants it too"
        )
        if self._is_file:
            message += "; a file:// rendezvous needs a fresh file for every run"
        return DuplicateWorker(message)


@contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Raise RendezvousError for what a store fails with while a worker of that name starts."""
    try:
        yield
    except StoreFailed as error:
        raise RendezvousError(f"init_rpc of {name!r} lost the store: {error}") from error


def _describe(worker: Worker) -> str:
    where = host_name(worker.host) or "an unknown host"
    return f"{worker.name!r} (rank {worker.id}, pid {worker.pid} on {where})"
