"""Objects to bytes and raw tensor buffers, and back. Knows no agent, link or protocol."""

from __future__ import annotations

from farcall.serde.exceptions import (
    RemoteTraceback,
    StoredError,
    add_note,
    message_of,
    notes_of,
    type_name_of,
)
from farcall.serde.failures import as_exception, dump_failure, load_failure, text_failure
from farcall.serde.functions import Functions, name_of, resolve
from farcall.serde.loading import Attach, load_reference
from farcall.serde.pickling import Payload
from farcall.serde.serializer import NO_ARGUMENTS, Serializer, reason_of
from farcall.serde.strict.objects import own_type
from farcall.serde.strict.only import Only, Unlisted, check_defined, name_of_class
from farcall.serde.tensors import DeviceMap
from farcall.serde.tracebacks import hide_own_frames, is_own, text_of

__all__ = [
    "NO_ARGUMENTS",
    "Attach",
    "DeviceMap",
    "Functions",
    "Only",
    "Payload",
    "RemoteTraceback",
    "Serializer",
    "StoredError",
    "Unlisted",
    "add_note",
    "as_exception",
    "check_defined",
    "dump_failure",
    "hide_own_frames",
    "is_own",
    "load_failure",
    "load_reference",
    "message_of",
    "name_of",
    "name_of_class",
    "notes_of",
    "own_type",
    "reason_of",
    "resolve",
    "text_failure",
    "text_of",
    "type_name_of",
]
