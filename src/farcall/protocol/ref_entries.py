"""The records of the reference protocol: what `refs.Refs` keeps."""

from __future__ import annotations

from enum import Enum

import msgspec

from farcall.ids import RefId
from farcall.protocol.instructions import TransferKey


class HeldState(Enum):
    """See the table in `refs`."""

    CREATING = "creating"
    REGISTERING = "registering"
    CONFIRMED = "confirmed"
    VOID = "void"


# There may be many of both, and they are in no cycle: the garbage collector need not see them.


class Owned(msgspec.Struct, eq=False, gc=False):
    """A value that lives here. It stays while it is used here, pinned, or held elsewhere."""

    local: int = 0
    pins: int = 0
    live: int = 0  # how many hold it elsewhere
    # Of each holder the highest sequence number seen; negative if that was no registration.
    holders: dict[int, int] = {}

    def note(self, holder: int, sequence: int, holds: bool) -> bool:
        """Take over a message of a holder; return False if a later one was seen: it is stale.

        Args:
            sequence: positive.
        """
        before = self.holders.get(holder, 0)
        if sequence <= abs(before):
            return sequence == abs(before)
        self.live += holds - (before > 0)
        self.holders[holder] = sequence if holds else -sequence
        return True

    def discard(self, holder: int) -> None:
        self.live -= self.holders.pop(holder, 0) > 0

    @property
    def is_free(self) -> bool:
        return not (self.local or self.pins or self.live)


class Held(msgspec.Struct, eq=False, gc=False):
    """A value that lives elsewhere."""

    owner: int
    owner_name: str
    sequence: int
    state: HeldState
    cause: str = ""  # why it is VOID; while CREATING: why the call failed, if it did
    local: int = 0
    pins: int = 0
    waiting: tuple[Arrival, ...] = ()

    @property
    def is_unconfirmed(self) -> bool:
        return self.state in (HeldState.CREATING, HeldState.REGISTERING)

    @property
    def is_free(self) -> bool:
        return not (self.local or self.pins or self.waiting)


class Arrival:
    """A received message whose references are not all confirmed, or not yet taken over."""

    __slots__ = ("blocking", "claimed", "failed", "handed_on", "key", "needs_answer", "unconfirmed")

    def __init__(
        self, key: TransferKey, claimed: list[tuple[RefId, int]], needs_answer: bool
    ) -> None:
        self.key = key
        self.claimed = claimed  # each with the incarnation of its owner
        self.needs_answer = needs_answer
        self.unconfirmed = 0  # REGISTERs without an answer: RECEIVED waits for them
        self.blocking = 0  # those of them that user code has to wait for
        self.handed_on = False
        self.failed = False
