"""Records that workers write to the store of their group, and checks that they are possible."""

from __future__ import annotations

from typing import Literal

import msgspec

from farcall.ids import Worker, is_name, original
from farcall.runtime.membership.signed_store import ValueKind

MAX_ID = (1 << 31) - 1
MAX_ADDRESSES = 16
MAX_TEXT = 300  # characters of an address, or of what identifies a host or a program


class Record(msgspec.Struct, frozen=True):
    """The worker of a name or an id. One that left may be replaced; one that is up may not."""

    worker: Worker
    state: Literal["up", "left"] = "up"


class Confirmation(msgspec.Struct, frozen=True):
    """A worker of a fixed group has seen the records of all: SHA-256 of their incarnations."""

    by: str
    members: bytes


class GateOutcome(msgspec.Struct, frozen=True):
    """The outcome of the wait of the whole group, and the worker that ended it.

    Attributes:
        members: of a group that is complete, as in `Confirmation`.
    """

    outcome: Literal["open", "aborted", "timed out"]
    by: str
    reason: str = ""
    members: bytes = b""


def is_possible(worker: Worker) -> bool:
    """Return whether a worker can have described itself so."""
    texts = (*worker.addresses, worker.host, worker.main)
    return (
        is_name(worker.name)
        and (not worker.role or is_name(worker.role))
        and 0 <= worker.id <= MAX_ID
        and worker.incarnation > 0
        and original(worker.incarnation) == worker.incarnation
        and len(worker.addresses) <= MAX_ADDRESSES
        and all(len(text) <= MAX_TEXT and text.isprintable() for text in texts)
    )


RECORD = ValueKind(
    Record, lambda record: record.worker.name, lambda record: is_possible(record.worker)
)
WORKER = ValueKind(Worker, lambda worker: worker.name, is_possible)
CONFIRMATION = ValueKind(Confirmation, lambda confirmation: confirmation.by)
GATE = ValueKind(GateOutcome, lambda gate: gate.by)
