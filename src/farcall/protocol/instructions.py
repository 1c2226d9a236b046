"""The instructions of the machines of calls and references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from farcall.ids import RefId
from farcall.wire.messages import Entry, Message, Register, Release


class TransferKey(NamedTuple):
    """A message with references, named alike at both ends: the other end, its call, which half."""

    peer: int
    call_id: int
    of_reply: bool


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send this message."""

    to: int
    message: Message
    call_id: int = 0


class Follow(msgspec.Struct, frozen=True, gc=False):
    """Send this message of the caller's after the request of its call, by the same way."""

    to: int
    message: Message
    call_id: int


class Answer(msgspec.Struct, frozen=True, gc=False):
    """Send this answer to a call, by the way that its request came."""

    to: int
    message: Message
    call_id: int


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Destroy the value of this reference (outside every lock)."""

    ref: RefId


class Ready(msgspec.Struct, frozen=True, gc=False):
    """Every reference in this received message may be used: hand it to user code."""

    key: TransferKey


class Unavailable(msgspec.Struct, frozen=True, gc=False):
    """A reference in this received message is gone: refuse the message."""

    key: TransferKey
    owner_name: str
    cause: str
    is_owner_lost: bool  # else it lives, and does not have the value


Instruction = Send | Follow | Answer | Drop | Ready | Unavailable

# A message of all entries there are, and the answer, could be larger than a frame may be.
MAX_ENTRIES = 1 << 16


class Instructions:
    """The instructions of a step, in order, with REGISTER and RELEASE batched per owner."""

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
        if not (self.registers or self.releases):
            if not self._said:
                return []
            said, self._said = self._said, []
            return said
        out: list[Instruction] = [
            Send(owner, Register(some)) for owner, some in _batches(self.registers)
        ]
        out += self._said
        out += [Send(owner, Release(some)) for owner, some in _batches(self.releases)]
        self.registers, self._said, self.releases = {}, [], {}
        return out


def _batches(entries: dict[int, list[Entry]]) -> Iterator[tuple[int, tuple[Entry, ...]]]:
    """Yield each owner with its entries, `MAX_ENTRIES` at a time."""
    for owner, all_of_it in entries.items():
        for start in range(0, len(all_of_it), MAX_ENTRIES):
            yield owner, tuple(all_of_it[start : start + MAX_ENTRIES])
