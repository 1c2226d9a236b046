"""Who is where: workers find each other at a torch Store.

A `Rendezvous` reads and writes records under one prefix of a store (TCPStore, FileStore and
HashStore alike). It opens no connection to a worker and keeps nothing: what it knows is in the
store. Under the prefix are

    name/<name>, rank/<id>   the record of the worker that has this name, this id: up or left
    members, member/<n>      the log of all names there ever were, in order
    next_id                  counter for workers that come without a rank
    gate                     how the wait of a group of fixed size ended: written once, for all

Records are taken over with compare-and-set, so two workers that want one name can't both win. The
gate makes the end of the wait one decision of all: either every worker of the group returns, or
none does, and all say why. So a worker that fails (its name is taken, its patience is over) takes
the others with it at once; they don't wait for it until their own timeout.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Literal

import msgspec
from torch.distributed import (  # type: ignore[attr-defined]  # as in stores.py
    DistNetworkError,
    FileStore,
    PrefixStore,
    Store,
)

from farcall.errors import DuplicateWorker, RendezvousError, RendezvousTimeout
from farcall.ids import Worker
from farcall.log import get_logger
from farcall.runtime.membership.hosts import host_name
from farcall.runtime.membership.stores import bounded, open_store, reopened

__all__ = ["Rendezvous", "open_store"]

_log = get_logger(__name__)

# How long to sleep, in seconds, before the store is asked again, and by which factor that grows.
# The store's own wait can't be interrupted, blocks all others that use the same store object, and
# when it ends without result torch's TCPStore prints two lines of warning.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.001, 0.05, 1.5
# Many workers ask less often, so that together they ask some thousand times a second.
_PAUSE_PER_WORKER = 0.001
# What leaving may cost, in seconds, when the store's host has vanished without closing.
_LEAVE_LIMIT = 5.0


class _Record(msgspec.Struct, frozen=True):
    """Who has a name or an id. One that left may be replaced; one that is up may not."""

    worker: Worker
    state: Literal["up", "left"] = "up"


class _Gate(msgspec.Struct, frozen=True):
    """How the wait of the whole group ended, and who ended it."""

    outcome: Literal["open", "aborted", "timed out"]
    by: str
    reason: str = ""


_encode = msgspec.json.Encoder().encode
_decode_record = msgspec.json.Decoder(_Record).decode
_decode_gate = msgspec.json.Decoder(_Gate).decode


def _nobody_is_dead(worker: Worker) -> bool:
    return False


class Rendezvous:
    """The meeting place of one group of workers.

    A group of fixed size uses a prefix once: the next `init_rpc` needs another one. Methods may be
    called from any thread.

    Args:
        store: where to meet.
        prefix: tells this group from others at the same store.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store: Store = PrefixStore(prefix, store)
        self._is_file = isinstance(store, FileStore)
        self._given_up = threading.Event()

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
            worker: who joins. In a group without a fixed size its id may be -1: it then gets the
                id that it had before, or the next free one; find it in the result by name.
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
            RendezvousTimeout: somebody is missing; says who.
            RendezvousError: another worker of the group failed, or the store is gone.
        """
        if world_size is not None and not 0 <= worker.id < world_size:
            raise ValueError(f"rank {worker.id} of {worker.name!r} is not in 0..{world_size - 1}")
        with self._store_errors(worker.name):
            try:
                self._register(worker, is_dead)
            except DuplicateWorker as error:
                if world_size is not None:
                    self._decide(_Gate("aborted", worker.name, str(error)))
                raise
            if world_size is None:
                return self.workers()
            return self._wait(worker, world_size, timeout)

    def give_up(self) -> None:
        """End a wait in `join` of another thread soon: it raises RendezvousError."""
        self._given_up.set()

    def find(self, name_or_id: str | int) -> Worker | None:
        """Ask the store for the live worker of this name or id. None: there is none.

        Raises:
            RuntimeError: the store is gone.
        """
        if isinstance(name_or_id, str):
            record = self._read(f"name/{name_or_id}")
            return record.worker if record is not None and record.state == "up" else None
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
        anew._store = reopened(self._store)
        if anew._read(f"name/{worker.name}") is None:
            anew._register_again(worker)
        # Only now: other threads ask by it, and would find nothing amiss at a store that was
        # started again and breaks before this worker is known there.
        self._store = anew._store

    def workers(self) -> list[Worker]:
        """Return the workers that are up now, in the order in which their names first came.

        Raises:
            RuntimeError: the store is gone.
        """
        keys = [f"member/{n}" for n in range(1, self._store.add("members", 0) + 1)]
        # A worker that is just joining may have counted itself without having written its name.
        logged = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        found = [self.find(name) for name in dict.fromkeys(logged)]
        return [worker for worker in found if worker is not None]

    def leave(self, worker: Worker) -> None:
        """Mark a worker, this one or one known to be dead, as gone; its name is free again.

        Does nothing when the name or id has passed to another incarnation, or when the store is
        gone: who leaves last can't rely on it. Blocks for at most a few seconds.
        """

        def mark() -> None:
            for key in (f"name/{worker.name}", f"rank/{worker.id}"):
                self._mark_left(key, worker)

        try:
            bounded(mark, _LEAVE_LIMIT, RendezvousTimeout("the store does not answer"))
        except RuntimeError as error:
            _log.debug("%r could not say that it leaves: %s", worker.name, error)

    def _register(self, worker: Worker, is_dead: Callable[[Worker], bool]) -> None:
        before = self._read(f"name/{worker.name}")
        if before is None:
            # Before the record: a death in between leaves a name without record, which is skipped;
            # the other way round it would leave a worker that nobody can list.
            number = self._store.add("members", 1)
            self._store.set(f"member/{number}", worker.name)
        for number in self._ids(worker, before):
            candidate = msgspec.structs.replace(worker, id=number)
            holder = self._claim(f"name/{worker.name}", candidate, is_dead)
            if holder is not None:
                raise self._duplicate(f"the name {worker.name!r}", holder, candidate)
            holder = self._claim(f"rank/{number}", candidate, is_dead)
            if holder is None:
                return
            self._mark_left(f"name/{worker.name}", candidate)
            if worker.id >= 0:
                raise self._duplicate(f"the rank {number}", holder, candidate)

    def _register_again(self, worker: Worker) -> None:
        """At a store that was started again, where newcomers may have been given ids of ours."""
        self._store.set(f"member/{self._store.add('members', 1)}", worker.name)
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
        missing = worker.id + 1 - self._store.add("next_id", 0)
        if missing > 0:
            self._store.add("next_id", missing)

    def _ids(self, worker: Worker, before: _Record | None) -> Iterator[int]:
        """The ids to try: the worker's own, or its former one and then ever new ones."""
        if worker.id >= 0:
            yield worker.id
            return
        if before is not None:
            yield before.worker.id
        while True:
            yield self._store.add("next_id", 1) - 1

    def _claim(self, key: str, worker: Worker, is_dead: Callable[[Worker], bool]) -> Worker | None:
        """Write the worker's record, unless a live worker has the key: then that worker."""
        wanted = _encode(_Record(worker))
        expected = b""  # for the stores: there is nothing yet
        while True:
            found = self._store.compare_set(key, expected.decode(), wanted.decode())
            if found == wanted:
                return None
            record = _decode_record(found)
            if record.state == "up" and not is_dead(record.worker):
                return record.worker
            expected = found

    def _mark_left(self, key: str, worker: Worker) -> None:
        record = self._read(key)
        if record is None or record.worker.incarnation != worker.incarnation:
            return
        left = _Record(record.worker, "left")
        self._store.compare_set(key, _encode(record).decode(), _encode(left).decode())

    def _wait(self, worker: Worker, world_size: int, timeout: float) -> list[Worker]:
        gate = self._wait_for_gate(worker, world_size, timeout)
        if gate.outcome == "open":
            # A worker that has left since was there: this worker's init_rpc succeeds all the same.
            return [self._record(rank).worker for rank in range(world_size)]
        if gate.outcome == "aborted":
            raise RendezvousError(f"init_rpc of {worker.name!r} can't succeed: {gate.reason}")
        if gate.by == worker.name:
            raise RendezvousTimeout(gate.reason)
        raise RendezvousTimeout(f"init_rpc of {worker.name!r} can't succeed: {gate.reason}")

    def _wait_for_gate(self, worker: Worker, world_size: int, timeout: float) -> _Gate:
        deadline = time.monotonic() + timeout if timeout else math.inf
        ranks = [f"rank/{rank}" for rank in range(world_size)]
        longest = max(_LONGEST_PAUSE, world_size * _PAUSE_PER_WORKER)
        pause = _FIRST_PAUSE
        while True:
            if self._store.check(["gate"]):
                return _decode_gate(self._store.get("gate"))
            # The last to come finds all ranks there, and opens the gate for those who wait.
            if self._store.check(ranks):
                return self._decide(_Gate("open", worker.name))
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                reason = self._missing(worker, world_size, timeout)
                return self._decide(_Gate("timed out", worker.name, reason))
            if self._given_up.wait(min(remaining, pause)):
                raise RendezvousError(f"init_rpc of {worker.name!r} was interrupted")
            pause = min(_GROWTH * pause, longest)

    def _decide(self, gate: _Gate) -> _Gate:
        """End the wait of the group in this way, unless it has ended; how it has ended."""
        return _decode_gate(self._store.compare_set("gate", "", _encode(gate).decode()))

    def _missing(self, worker: Worker, world_size: int, timeout: float) -> str:
        records = [self._read(f"rank/{rank}") for rank in range(world_size)]
        here = [record.worker for record in records if record is not None]
        missing = [f"rank {rank}" for rank, record in enumerate(records) if record is None]
        return (
            f"init_rpc of {worker.name!r} waited {timeout:.1f} s: "
            f"{len(here)} of {world_size} workers are here: "
            f"{', '.join(f'{one.name} (rank {one.id})' for one in here)}; "
            f"missing: {', '.join(missing)}"
        )

    def _record(self, rank: int) -> _Record:
        return _decode_record(self._store.get(f"rank/{rank}"))

    def _read(self, key: str) -> _Record | None:
        # Records are never deleted, so what `check` has seen `get` finds without waiting.
        return _decode_record(self._store.get(key)) if self._store.check([key]) else None

    def _duplicate(self, what: str, first: Worker, second: Worker) -> DuplicateWorker:
        message = (
            f"{what} is not unique: {_describe(first)} has it, {_describe(second)} wants it too"
        )
        if self._is_file:
            message += "; a file:// rendezvous needs a fresh file for every run"
        return DuplicateWorker(message)

    @contextmanager
    def _store_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            reason = str(error).splitlines()[0]
            raise RendezvousError(f"init_rpc of {name!r} lost the store: {reason}") from error


def _describe(worker: Worker) -> str:
    where = host_name(worker.host) or "an unknown host"
    return f"{worker.name!r} (rank {worker.id}, pid {worker.pid} on {where})"
