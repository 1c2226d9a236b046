"""A schedule as a person reads it: a line for each event, with what matters of each message."""

from __future__ import annotations

import msgspec

from farcall.ids import RefId, meeting_of
from farcall.protocol.instructions import TransferKey
from farcall.wire.messages import Message, Reference
from simulator.sim_records import Handle


def told(part: object) -> str:
    """Return what a part of a line says: a message, a reference, or anything else."""
    if isinstance(part, Handle):
        return told(part.ref) + "'" * meeting_of(part.owner)
    if isinstance(part, Reference):
        return f"{RefId(part.minted_by, part.number)} of {part.owner_name}"
    if isinstance(part, TransferKey):
        return f"{'answer' if part.of_reply else 'request'} {part.call_id} of {part.peer}"
    if isinstance(part, Message):
        return _told_message(part)
    if isinstance(part, bytes):  # the number of a reference
        return f"{int.from_bytes(part, 'big'):x}"
    if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
        return "[" + ", ".join(told(one) for one in part) + "]"
    return str(part)


def _told_message(message: Message) -> str:
    """Return a message's kind, and its fields that are not as they are most often."""
    fields = []
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if value != field.default and value not in ((), "", b"", 0):
            fields.append(f"{field.name}={told(value)}")
    return f"{type(message).__name__}({', '.join(fields)})"
