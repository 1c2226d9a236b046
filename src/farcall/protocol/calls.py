"""Track the calls between two workers, at the caller and at the callee.

The caller completes each call once, with whatever comes first: the answer, its own timeout, or the
loss of the peer. The callee runs each function at most once, even if requests and cancellations are
lost, come twice, or overtake each other. A caller numbers the calls to each peer 1, 2, 3 ..., so
the callee needs one number and a small set to know which calls it has seen.

Caller (`Outgoing`), per call id:

    state      event                  next       effect
    ---------  ---------------------  ---------  ---------------------------------------------
    -          begin                  OPEN
    OPEN       outcome arrived        -          the record comes out: complete it
    OPEN       abandon (timeout, ..)  ABANDONED  the record comes out; CANCEL must be sent
    OPEN       retract (not sent)     -          the record comes out; the id is free again
    OPEN       peer lost              -          the record comes out: PeerLost
    ABANDONED  outcome arrived        -          nothing to complete: the call is closed
    ABANDONED  retract (not sent)     -          the id is free again
    ABANDONED  peer lost              -
    -          outcome arrived        -          late or duplicate: ignored

Callee (`Incoming`), per call id:

    state      event                  next       effect
    ---------  ---------------------  ---------  ---------------------------------------------
    unseen     request                RUNNING    run it
    unseen     cancel                 FINISHED   never run it, even if it arrives later; answer
    RUNNING    request (duplicate)    RUNNING    ignored
    RUNNING    cancel                 RUNNING    the record comes out: stop it if it can be
    RUNNING    finish                 FINISHED   send the outcome, or "cancelled"
    FINISHED   request (duplicate)    FINISHED   ignored
    FINISHED   cancel                 FINISHED   answer again, unless the caller waits for the first
    any        caller lost            FINISHED   every record that runs comes out

Invariants (tests cite them):

CALL-1  A record comes out of `Outgoing` exactly once: every call has one outcome.
CALL-2  `Incoming.request` is true at most once per call id: a function runs at most once.
CALL-3  An abandoned call is closed by the callee's answer, after which it can't run any more.
CALL-4  An id of which the callee has heard nothing is given to the next call. So the ids that the
        callee has seen have no more holes than calls were begun at once, and the callee's memory is
        bounded.
CALL-5  A caller that waits gets the outcome of the function that it called, if there is one.

A call can be stopped before its function begins, and after the function has returned a future that
is not completed: the function has run then, and only its outcome is missing. Such a call finishes
at the CANCEL, not when the future completes, which may be never. While its function runs, a call
can't be stopped, but the calls that the function makes are cancelled if the caller's program asked
for that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from itertools import count
from typing import Generic, TypeVar

Record = TypeVar("Record")


class Outgoing(Generic[Record]):
    """Calls made to one peer incarnation. `Record` is whatever the owner wants back at the end.

    The steps of every call need no lock: taking a record out of the table is one atomic step, so
    exactly one thread gets it. But the owner holds one around `abandon` and `retract`: an id that
    is free again may belong to another call at once. A call that is begun while `take_all` runs may
    come out of it, or stay.
    """

    __slots__ = ("_abandoned", "_free", "_ids", "_open", "_reused")

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: dict[int, Record] = {}
        self._abandoned: set[int] = set()
        self._free: list[int] = []
        self._reused = iter(self._free.pop, None)

    def begin(self, record: Record) -> int:
        """Begin a call, and return its id."""
        # A `for` takes an id and keeps it without a call in between. Python runs signal handlers
        # after calls: a KeyboardInterrupt there would lose the id, and CALL-4 with it.
        if self._free:
            try:
                for call_id in self._reused:
                    self._open[call_id] = record
                    return call_id
            except IndexError:  # another thread was faster
                pass  # another thread was faster
        for call_id in self._ids:
            self._open[call_id] = record
            return call_id
        raise AssertionError("numbers never end")

    def outcome(self, call_id: int) -> Record | None:
        """Return the record that an answer completes; None if the answer is late or a duplicate."""
        record = self._open.pop(call_id, None)
        if record is None:
            self._abandoned.discard(call_id)
        return record

    def abandon(self, call_id: int, record: Record) -> bool:
        """Give up. Returns True: fail the record, and send CANCEL if the request was sent.

        Returns False, without side effects, if the call is over already.
        """
        if self._open.get(call_id) is not record:
            return False
        self._abandoned.add(call_id)  # first: the answer may come as soon as the record is out
        if self._open.pop(call_id, None) is None:
            self._abandoned.discard(call_id)  # another thread was faster
            return False  # another thread was faster
        return True

    def retract(self, call_id: int, record: Record) -> bool:
        """Withdraw a call of which the callee has heard nothing, not even a CANCEL, and never will.

        Whatever else goes by the id must have been undone before. Returns whether the record is to
        be failed: it came out here, and not before by `abandon` or `take_all`.
        """
        is_open = self._open.get(call_id) is record
        if is_open:
            is_open = self._open.pop(call_id, None) is not None
        elif call_id not in self._abandoned:
            return False  # its peer is lost
        self._abandoned.discard(call_id)
        self._free.append(call_id)
        return is_open

    def find(self, record: Record) -> int:
        """Return the id of an open call; 0 if it is not open. Slow: it looks at all of them."""
        for call_id, found in list(self._open.items()):
            if found is record:
                return call_id
        return 0

    def take_all(self) -> list[Record]:
        """Take out and return every open record, to be failed: the peer is gone."""
        taken = [self._open.pop(call_id, None) for call_id in list(self._open)]
        self._abandoned.clear()
        return [record for record in taken if record is not None]

    def peek(self, call_id: int) -> Record | None:
        """Return the record of an open call."""
        return self._open.get(call_id)

    def is_closed(self, call_id: int) -> bool:
        """Return whether an answer to this call would be ignored."""
        return call_id not in self._open

    def abandoned(self) -> Iterator[int]:
        """Calls whose CANCEL has not been answered; over a lossy network, send it again."""
        return iter(tuple(self._abandoned))

    def is_abandoned(self, call_id: int) -> bool:
        return call_id in self._abandoned

    def records(self) -> list[Record]:
        """Return those of all open calls."""
        return list(self._open.values())

    def open_ids(self) -> Iterator[int]:
        return iter(tuple(self._open))

    def __len__(self) -> int:
        """Return how many calls have no outcome."""
        return len(self._open)


class CancelResult(Enum):
    """The finding of a CANCEL."""

    RUNNING = "running"  # the function is queued or running: its outcome will be the answer
    UNSEEN = "unseen"  # it will never run: answer "cancelled" now
    FINISHED = "finished"  # it has ended: its answer was sent, or is about to be


class Incoming(Generic[Record]):
    """Calls received from one peer incarnation.

    `finish` may be called by any thread at any time; the others need a lock.
    """

    __slots__ = ("_cancelled", "_running", "_seen_above", "_seen_to", "_total")

    def __init__(self) -> None:
        self._cancelled = 0  # before their requests came
        self._total: int | None = None  # what `received` was when the caller was lost
        self._seen_to = 0
        self._seen_above: set[int] = set()
        self._running: dict[int, Record] = {}

    def request(self, call_id: int, record: Record) -> bool:
        """Return whether to run a request: if not, it is a duplicate, or was cancelled."""
        if call_id == self._seen_to + 1 and not self._seen_above:
            self._seen_to = call_id  # `_see`, without a call: what nearly every request does
        elif not self._see(call_id):
            return False
        self._running[call_id] = record
        return True

    def finish(self, call_id: int) -> bool:
        """End a call; return whether to send its outcome: if not, the caller is gone."""
        return self._running.pop(call_id, None) is not None

    def cancel(self, call_id: int) -> tuple[CancelResult, Record | None]:
        """Cancel a call that its caller gave up. RUNNING comes with the record, to be stopped."""
        record = self._running.get(call_id)
        if record is not None:
            return CancelResult.RUNNING, record
        if not self._see(call_id):
            return CancelResult.FINISHED, None
        self._cancelled += 1
        return CancelResult.UNSEEN, None

    def take_all(self) -> list[Record]:
        """Accept no more, and return the records of what still runs: the caller is gone."""
        self._total = self.received
        running, self._running = self._running, {}
        self._seen_to = sys.maxsize
        return list(running.values())

    @property
    def received(self) -> int:
        """The number of calls received in all. The ids tell, so nothing is counted per call."""
        if self._total is not None:
            return self._total
        return self._seen_to + len(self._seen_above) - self._cancelled

    def records(self) -> list[Record]:
        """Return those of all calls that are queued or run."""
        return list(self._running.values())

    def has_seen(self, call_id: int) -> bool:
        return call_id <= self._seen_to or call_id in self._seen_above

    def __len__(self) -> int:
        """Return how many calls are queued or running."""
        return len(self._running)

    def _see(self, call_id: int) -> bool:
        if call_id == self._seen_to + 1:
            self._seen_to = call_id
            if self._seen_above:
                self._close_gap()
            return True
        if self.has_seen(call_id):
            return False
        self._seen_above.add(call_id)
        return True

    def _close_gap(self) -> None:
        while self._seen_to + 1 in self._seen_above:
            self._seen_to += 1
            self._seen_above.remove(self._seen_to)
