"""Frames: a message, its body and its buffers, as they travel on a link.

A frame is

    header       32 bytes, fixed (see `HEADER`)
    table        buffer_count little-endian u64: the length of each buffer, in bytes
    meta         meta_length bytes: the message, msgpack, of the type that `kind` names
    body         body_length bytes: pickled user data, opaque here
    buffers      each starts at the next multiple of 64 bytes from the start of the frame

Decoding checks every length against `Limits` before anything is allocated. The sender checks the
same lengths before anything is written: a frame that breaks a limit would cost it the link.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from farcall.errors import BadFrame, SerializationError
from farcall.wire.messages import KINDS, Buffer, Kind, Message, OnDevice, encode_message

MAGIC = b"fcal"
VERSION = 1
ALIGNMENT = 64

# magic, version, kind, flags, meta_length, buffer_count, call_id, body_length
HEADER = struct.Struct("<4sBBHIIQQ")
_pack = HEADER.pack

_KINDS = {int(kind): kind for kind in Kind}


class Limits(NamedTuple):
    """The most that a peer may make us allocate, per frame. All in bytes but `buffers`."""

    meta: int = 64 << 20
    body: int = 16 << 30
    buffers: int = 1 << 20
    buffer: int = 1 << 40
    frame: int = 1 << 40


DEFAULT_LIMITS = Limits()
SENDING_LIMITS = DEFAULT_LIMITS  # what every receiver takes
JOINED_SIZE = 32 << 10  # no more bytes than these, without buffers, are written as one string


class Header(NamedTuple):
    """A decoded and checked frame header. Lengths in bytes."""

    kind: Kind
    flags: int
    meta_length: int
    buffer_count: int
    call_id: int
    body_length: int

    @property
    def table_length(self) -> int:
        return 8 * self.buffer_count

    @property
    def front_length(self) -> int:
        """Bytes between the header and the buffers' first padding."""
        return 8 * self.buffer_count + self.meta_length + self.body_length


class Frame(msgspec.Struct, eq=False, gc=False):
    """One message with its body and buffers. Immutable by convention; `buffers` are not copied."""

    message: Message
    call_id: int = 0
    body: Buffer = b""
    buffers: Sequence[Buffer] = ()

    def __repr__(self) -> str:
        return (
            f"Frame({self.message!r}, call_id={self.call_id}, "
            f"body={len(self.body)} bytes, buffers={[len(b) for b in self.buffers]})"
        )


def padding(offset: int) -> int:
    """Bytes from `offset` to the next multiple of the alignment."""
    return -offset % ALIGNMENT


_PADS = [bytes(n) for n in range(ALIGNMENT)]


def check_size(message: Message, meta: int, body: int, buffers: Sequence[Buffer]) -> None:
    """Check that a receiver takes a frame, before anything of it is written.

    Args:
        message: the message of the frame, for the error.
        meta: the length of its metadata, in bytes.
        body: the length of its body, in bytes.
        buffers: its buffers.

    Raises:
        SerializationError: the frame breaks a limit that receivers enforce. Its message says which.
    """
    max_meta, max_body, max_buffers, max_buffer, max_frame = SENDING_LIMITS
    most, total = 0, body
    for one in buffers:
        size = one.size if type(one) is OnDevice else len(one)
        total += size
        if size > most:  # noqa: PLR1730  `max` takes three times as long
            most = size
    count = len(buffers)
    if (
        meta <= max_meta
        and body <= max_body
        and count <= max_buffers
        and most <= max_buffer
        and total <= max_frame
    ):
        return
    for length, limit, what in (
        (meta, max_meta, "bytes of metadata (names, references and texts)"),
        (body, max_body, "bytes of pickled data"),
        (count, max_buffers, "buffers"),
        (most, max_buffer, "bytes in one buffer"),
        (total, max_frame, "bytes in all"),
    ):
        if length > limit:
            name = type(message).__name__.lower()
            raise SerializationError(
                f"the {name} can't be sent: it has {length} {what}; the limit is {limit}"
            )


def encode(frame: Frame) -> list[Buffer]:
    """Return the frame as byte strings and buffers to be written one after the other.

    Large bodies and buffers are passed through, not copied. Buffers must be flat bytes.

    Raises:
        SerializationError: the frame is larger than a receiver takes.
    """
    message = frame.message
    meta = encode_message(message)
    body, buffers = frame.body, frame.buffers
    meta_length, body_length = len(meta), len(body)
    if not buffers and meta_length + body_length <= JOINED_SIZE:
        kind, call_id = KINDS[type(message)], frame.call_id
        head = _pack(MAGIC, VERSION, kind, 0, meta_length, 0, call_id, body_length)
        return [b"".join((head, meta, body))]
    check_size(message, meta_length, body_length, buffers)
    head = _pack(
        MAGIC,
        VERSION,
        KINDS[type(message)],
        0,
        meta_length,
        len(buffers),
        frame.call_id,
        body_length,
    )
    if not buffers:
        return [head + meta, body]
    lengths = [len(buffer) for buffer in buffers]
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    parts: list[Buffer] = [head + table + meta, body]
    offset = len(parts[0]) + body_length
    for buffer, length in zip(buffers, lengths, strict=True):
        pad = -offset % ALIGNMENT
        if pad:
            parts.append(_PADS[pad])
        parts.append(buffer)
        offset += pad + length
    return parts


def decode_header(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> Header:
    """Check and unpack the first `HEADER.size` bytes of a frame.

    Raises:
        BadFrame: not a frame of this version, or a length is over its limit.
    """
    magic, version, kind, flags, meta, count, call_id, body = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame(f"not a farcall frame: it starts with {bytes(magic)!r}")
    if version != VERSION:
        raise BadFrame(f"frame version {version}; this farcall speaks version {VERSION}")
    known = _KINDS.get(kind)
    if known is None:
        raise BadFrame(f"unknown frame kind {kind}")
    if meta > limits.meta:
        raise BadFrame(f"frame claims {meta} bytes of metadata; the limit is {limits.meta}")
    if count > limits.buffers:
        raise BadFrame(f"frame claims {count} buffers; the limit is {limits.buffers}")
    if body > limits.body:
        raise BadFrame(f"frame claims a body of {body} bytes; the limit is {limits.body}")
    return tuple.__new__(Header, (known, flags, meta, count, call_id, body))


def decode_table(header: Header, table: Buffer, limits: Limits = DEFAULT_LIMITS) -> list[int]:
    """Return the buffers' lengths, in bytes.

    Raises:
        BadFrame: a buffer, or the whole frame, is over its limit.
    """
    lengths = list(struct.unpack(f"<{header.buffer_count}Q", table))
    total = header.body_length
    for index, length in enumerate(lengths):
        if length > limits.buffer:
            raise BadFrame(
                f"frame claims {length} bytes for buffer {index}; the limit is {limits.buffer}"
            )
        total += length
    if total > limits.frame:
        raise BadFrame(f"frame claims {total} bytes in all; the limit is {limits.frame}")
    return lengths
