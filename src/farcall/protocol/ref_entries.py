"""The records of the reference protocol: what `refs.Refs` keeps, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from farcall.ids import RefId
from farcall.wire.messages import Message, Register, Release


class TransferKey(NamedTuple):
    """A message with references, named alike at both ends: the other end, its call, which half."""

    peer: int
    call_id: int
    of_reply: bool


class Send(NamedTuple):
    """Send this message."""

    to: int
    message: Message
    call_id: int = 0


class Drop(NamedTuple):
    """Destroy the value of this reference (outside every lock)."""

    ref: RefId


class Ready(NamedTuple):
    """Every reference in this received message may be used: hand it to user code."""

    key: TransferKey


class Unavailable(NamedTuple):
    """A reference in this received message is gone: refuse the message."""

    key: TransferKey
    owner_name: str
    cause: str


Instruction = Send | Drop | Ready | Unavailable


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

    def forget(self, holder: int) -> None:
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

    def __init__(self, key: TransferKey, claimed: list[RefId], needs_answer: bool) -> None:
        self.key = key
        self.claimed = claimed
        self.needs_answer = needs_answer
        self.unconfirmed = 0  # REGISTERs without an answer: RECEIVED waits for them
        self.blocking = 0  # those of them that user code has to wait for
        self.handed_on = False
        self.failed = False


Entry = tuple[int, int, int]  # minted_by, number, sequence

# A message of all entries there are, and the answer, could be larger than a frame may be.
MAX_ENTRIES = 1 << 16


class Outbox:
    """What has to be done, in order, with REGISTER and RELEASE batched per owner."""

    def __init__(self) -> None:
        self._said: list[Instruction] = []
        self.registers: dict[int, list[Entry]] = {}
        self.releases: dict[int, list[Entry]] = {}

    def say(self, instruction: Instruction) -> None:
        self._said.append(instruction)

    def register(self, owner: int, entry: Entry) -> None:
        self.registers.setdefault(owner, []).append(entry)

    def release(self, owner: int, entry: Entry) -> None:
        self.releases.setdefault(owner, []).append(entry)

    def take(self) -> list[Instruction]:
        """Everything since the last call: registrations first, releases last."""
        if not (self._said or self.registers or self.releases):
            return []
        out: list[Instruction] = [
            Send(owner, Register(some)) for owner, some in _batches(self.registers)
        ]
        out += self._said
        out += [Send(owner, Release(some)) for owner, some in _batches(self.releases)]
        self.registers, self._said, self.releases = {}, [], {}
        return out


def _batches(entries: dict[int, list[Entry]]) -> Iterator[tuple[int, tuple[Entry, ...]]]:
    """Each owner with its entries, `MAX_ENTRIES` at a time."""
    for owner, all_of_it in entries.items():
        for start in range(0, len(all_of_it), MAX_ENTRIES):
            yield owner, tuple(all_of_it[start : start + MAX_ENTRIES])
