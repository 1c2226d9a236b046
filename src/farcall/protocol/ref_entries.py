"""The records of the reference protocol: what `refs.Refs` keeps."""

from __future__ import annotations

from enum import Enum

from farcall.ids import RefId
from farcall.protocol.instructions import TransferKey


class HeldState(Enum):
    """See the table in `refs`."""

    CREATING = "creating"
    REGISTERING = "registering"
    CONFIRMED = "confirmed"
    VOID = "void"


class Owned:
    """A value that lives here. It stays while it is used here, pinned, or held elsewhere."""

    __slots__ = ("holders", "live", "local", "pins")

    def __init__(self, local: int) -> None:
        self.local = local
        self.pins = 0
        self.live = 0
        # holder -> (highest sequence seen, whether that was a registration)
        self.holders: dict[int, tuple[int, bool]] = {}

    def note(self, holder: int, sequence: int, holds: bool) -> bool:
        """Take over a message of a holder unless a later one was seen. False: it is stale."""
        seen, held = self.holders.get(holder, (0, False))
        if sequence < seen:
            return False
        if sequence > seen:
            self.live += holds - held
            self.holders[holder] = (sequence, holds)
        return True

    def discard(self, holder: int) -> None:
        _, held = self.holders.pop(holder, (0, False))
        self.live -= held

    @property
    def is_free(self) -> bool:
        return not (self.local or self.pins or self.live)


class Held:
    """A value that lives elsewhere."""

    __slots__ = ("cause", "local", "owner", "owner_name", "pins", "sequence", "state", "waiting")

    def __init__(self, owner: int, owner_name: str, sequence: int, state: HeldState) -> None:
        self.owner = owner
        self.owner_name = owner_name
        self.sequence = sequence
        self.state = state
        self.cause = ""  # why it is VOID; while CREATING: why the call failed, if it did
        self.local = 0
        self.pins = 0
        self.waiting: list[Arrival] = []

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
