"""The wait of a group of fixed size for all of its workers, which ends in one way for all of them.

The gate is written once: either every worker of the group returns, or none does, and all say why.
So a worker that fails (its name is taken, its patience is over) takes the others with it at once;
they don't wait for it until their own timeout.

The gate opens when all have confirmed that they see the same incarnations. Each of these is new, so
no confirmation is older than the youngest worker: all of them are here, in this run. A record or a
gate of an earlier run has another incarnation for at least one of them, and is found out by it.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Sequence

from farcall.errors import RendezvousError, RendezvousTimeout
from farcall.ids import Worker
from farcall.runtime.membership.records import CONFIRMATION, GATE, RECORD, Confirmation, GateOutcome
from farcall.runtime.membership.signed_store import SignedStore

# How long to sleep, in seconds, before the store is asked again, and by which factor that grows: a
# pause is a sixth of the time that went by before it.
# The store's own wait can't be interrupted, blocks all others that use the same store object, and
# when it ends without result torch's TCPStore prints two lines of warning.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.0003, 0.05, 1.2
# Many workers ask less often, so that together they ask some ten thousand times a second at first,
# and later a thousand times.
_FIRST_PER_WORKER, _LONGEST_PER_WORKER = 0.0001, 0.001
# How long, in seconds, a record stands in a worker's place that the worker has not signed, until
# the wait ends. The worker may be late, and will put its own there.
CLAIM_SECONDS = 5.0


class FixedGroup:
    """A group of fixed size, as one of its workers sees it that has registered at the store.

    Args:
        board: where the group meets.
        me: this worker.
        size: how many there are.
    """

    def __init__(self, board: SignedStore, me: Worker, size: int) -> None:
        self._board = board
        self._me = me
        self._size = size
        self._ranks = [f"rank/{rank}" for rank in range(size)]
        self._confirmations = [f"confirmed/{rank}" for rank in range(size)]
        self._seen: list[Worker] = []  # all workers by rank, or none while they are not there
        self._claimed_at = math.inf  # when another worker was first seen in the place of one

    def abort(self, reason: str) -> None:
        """End the wait of all."""
        self._decide(GateOutcome("aborted", self._me.name, reason))

    def wait(self, timeout: float, deadline: float, given_up: threading.Event) -> list[Worker]:
        """Return all workers, by rank, when they are there. Blocks the calling thread.

        Args:
            timeout: for the message: seconds that there are in all.
            deadline: `time.monotonic()` seconds.
            given_up: ends this worker's wait.

        Raises:
            RendezvousTimeout: a worker is missing; says which.
            RendezvousError: another worker has ended the wait, this one was interrupted, or not
                all see the same workers.
        """
        pause = first = max(_FIRST_PAUSE, self._size * _FIRST_PER_WORKER)
        longest = max(_LONGEST_PAUSE, self._size * _LONGEST_PER_WORKER)
        has_confirmed = False
        begun = time.monotonic()
        while True:
            gate = self._gate()
            if gate is not None:
                return self._ended(gate)
            # The last to confirm finds that all have, and opens the gate for those who wait.
            if self._is_confirmed():
                opened = GateOutcome("open", self._me.name, members=_digest(self._seen))
                return self._ended(self._decide(opened))
            now = time.monotonic()
            if now >= self._claimed_at + CLAIM_SECONDS:
                aborted = GateOutcome("aborted", self._me.name, self._missing(now - begun))
                return self._ended(self._decide(aborted))
            remaining = deadline - now
            if remaining <= 0:
                late = GateOutcome("timed out", self._me.name, self._missing(timeout))
                return self._ended(self._decide(late))
            if self._seen and not has_confirmed:
                has_confirmed = True
                pause = first  # all are here, and are about to confirm it, too
            if given_up.wait(min(remaining, pause)):
                raise RendezvousError(f"init_rpc of {self._me.name!r} was interrupted")
            pause = min(_GROWTH * pause, longest)

    def _is_confirmed(self) -> bool:
        """Return whether all workers are there and have said so; if they are, say so, too."""
        if not self._seen and self._board.are_there(self._ranks):
            self._seen = self._look()
            if self._seen:
                confirmation = Confirmation(self._me.name, _digest(self._seen))
                self._board.put(f"confirmed/{self._me.id}", confirmation)
        if not self._seen or not self._board.are_there(self._confirmations):
            return False
        members = _digest(self._seen)
        said = (self._board.read(key, CONFIRMATION).value for key in self._confirmations)
        if all(
            one == Confirmation(worker.name, members)
            for one, worker in zip(said, self._seen, strict=True)
        ):
            return True
        self._seen = []  # a worker sees others: look again
        return False

    def _look(self) -> list[Worker]:
        """Return the workers by rank, or none if one is missing or this one's place is taken."""
        found = [self._board.read(key, RECORD) for key in self._ranks]
        is_claimed = any(one.claim is not None for one in found)
        self._claimed_at = min(self._claimed_at, time.monotonic()) if is_claimed else math.inf
        workers = [one.value.worker for one in found if one.value is not None]
        is_whole = [worker.id for worker in workers] == list(range(self._size))
        is_mine = is_whole and workers[self._me.id].incarnation == self._me.incarnation
        return workers if is_mine else []

    def _gate(self) -> GateOutcome | None:
        is_there = self._board.are_there(["gate"])
        return self._board.read("gate", GATE).value if is_there else None

    def _decide(self, gate: GateOutcome) -> GateOutcome:
        """End the wait of the group in this way, unless it has ended; return how it has ended."""
        return self._board.settle("gate", GATE, gate)

    def _ended(self, gate: GateOutcome) -> list[Worker]:
        """Return the group, or raise why there is none."""
        failed = f"init_rpc of {self._me.name!r} can't succeed: "
        if gate.outcome == "timed out" and gate.by == self._me.name:
            raise RendezvousTimeout(gate.reason)
        if gate.outcome == "timed out":
            raise RendezvousTimeout(failed + gate.reason)
        if gate.outcome == "aborted":
            raise RendezvousError(failed + gate.reason)
        if not self._seen:
            self._seen = self._look()
        if _digest(self._seen) != gate.members:
            raise RendezvousError(
                f"{failed}the group that {gate.by!r} has seen complete is another one than is at "
                "the store now, which was used by an earlier run, or has been altered since"
            )
        return self._seen

    def _missing(self, timeout: float) -> str:
        """Return why the group is not complete, after so many seconds."""
        found = [self._board.read(key, RECORD) for key in self._ranks]
        here = [one.value.worker for one in found if one.value is not None]
        missing = [rank for rank, one in enumerate(found) if one.value is None]
        others = [rank for rank in missing if found[rank].claim is not None]
        if others:
            why = dict.fromkeys(found[rank].objection for rank in others)
            lacking = f"{_ranks(others)} can't be believed, since {'; '.join(why)}"
        elif missing:
            lacking = f"missing: {_ranks(missing)}"
        else:
            lacking = "but not all of them say so in this run: is the store one of an earlier run?"
        return (
            f"init_rpc of {self._me.name!r} waited {timeout:.1f} s: "
            f"{len(here)} of {self._size} workers are here: "
            f"{', '.join(f'{one.name} (rank {one.id})' for one in here)}; {lacking}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _digest(workers: Sequence[Worker]) -> bytes:
    """Return what a group is confirmed by; nothing of none."""
    numbers = b"".join(worker.incarnation.to_bytes(8, "little") for worker in workers)
    return hashlib.sha256(numbers).digest() if workers else b""
