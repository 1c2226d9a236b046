"""Frames, cut into messages of a process group.

Everything begins with a message of at most `MESSAGE_SIZE` bytes under `ENVELOPE_TAG`: an envelope
(see `ENVELOPE`), and behind it what fits. A frame that fits into it is there as a whole: header,
table, meta, body, then the buffers without padding. Of one that doesn't, the header is there, and
the front (table, meta, body) if that fits; the rest follows under `PAYLOAD_TAG`: the front, then
the buffers that are not empty, the small ones batched. Both sides know the lengths from the front,
so they agree on the batches.

Buffers on a device are empty in the frame. They go by device channels, before it, and are announced
by a message of the kind `ON_DEVICE`: index and size of each, in the order in which they go.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum

from farcall.errors import BadFrame
from farcall.transport.sockets.framing import allocate
from farcall.wire.frames import HEADER, Frame, Limits, decode_header, decode_table, encode
from farcall.wire.messages import Buffer, OnDevice, decode_message

ENVELOPE_TAG = 1
PAYLOAD_TAG = 2
ALARM_TAG = 3  # one message: the sender's device channels are broken
MESSAGE_SIZE = 32768
LONE_SIZE = 32768  # from here on a buffer is a message of its own, and not copied
BATCH_SIZE = 1 << 20

# kind, whether the sender of this dialled the link, the link's number, bytes behind the envelope,
# bytes that follow under the other tag
ENVELOPE = struct.Struct("<BBxxIIxxxxQ")
ROOM = MESSAGE_SIZE - ENVELOPE.size
_ANNOUNCED = struct.Struct("<QQ")  # index, size in bytes


class EnvelopeKind(IntEnum):
    """The kinds of envelopes."""

    OPEN = 0
    OPENED = 1
    REFUSED = 2
    FRAME = 3
    END = 4
    BYE = 5
    ON_DEVICE = 6
    HOLD = 7  # send no frames on this link
    GO_ON = 8


def batches(lengths: Sequence[int]) -> Iterator[slice]:
    """Return which buffers travel in one message; none of these is empty. Lengths in bytes."""
    start = size = 0
    for index, length in enumerate(lengths):
        if length >= LONE_SIZE or size + length > BATCH_SIZE:
            if index > start:
                yield slice(start, index)
            start, size = index, 0
        size += length
        if length >= LONE_SIZE:
            yield slice(index, index + 1)
            start, size = index + 1, 0
    if start < len(lengths):
        yield slice(start, len(lengths))


def pack(frame: Frame) -> tuple[list[Buffer], list[Buffer]]:
    """Return the bytes behind the envelope, and the messages that follow.

    Buffers of `LONE_SIZE` and more are passed through, everything else is copied when it is joined.
    """
    parts = encode(frame)
    front = parts[:2] if frame.buffers else parts
    buffers = [buffer for buffer in frame.buffers if len(buffer)]
    front_size = sum(map(len, front))
    if front_size + sum(map(len, buffers)) <= ROOM:
        return [*front, *buffers], []
    payload: list[Buffer] = []
    if front_size > ROOM:
        joined = memoryview(bytearray().join(front))
        front = [joined[: HEADER.size]]
        payload.append(joined[HEADER.size :])
    for batch in batches([len(buffer) for buffer in buffers]):
        some = buffers[batch]
        lone = len(some[0]) >= LONE_SIZE
        payload.append(some[0] if lone else bytearray().join(some))
    return front, payload


def unpack(
    inline: memoryview, follows: bool, receive: Callable[[Buffer], None], limits: Limits
) -> Frame:
    """Return the frame whose beginning stands behind an envelope.

    Args:
        inline: what stands there; it is copied.
        follows: whether there are more messages.
        receive: fills memory with the next of them.

    Raises:
        BadFrame: it is none, or breaks a limit.
    """
    if len(inline) < HEADER.size:
        raise BadFrame(f"{len(inline)} bytes are no frame")
    header = decode_header(inline, limits)
    end = HEADER.size + header.front_length
    if len(inline) >= end:
        front = memoryview(bytes(inline[HEADER.size : end]))
    elif follows and len(inline) == HEADER.size:
        front = memoryview(allocate(header.front_length))
        receive(front)
    else:
        raise BadFrame(f"a frame of {end} bytes without its buffers came as {len(inline)} bytes")
    table_end = header.table_length
    meta_end = table_end + header.meta_length
    message = decode_message(header.kind, front[table_end:meta_end])
    lengths = decode_table(header, front[:table_end], limits)
    if follows:
        buffers = _receive_buffers(lengths, receive)
    else:
        if end + sum(lengths) != len(inline):
            raise BadFrame(f"a frame of {end + sum(lengths)} bytes came as {len(inline)} bytes")
        buffers = list[Buffer](_cut(inline[end:], lengths))
    body = front[meta_end:]
    return Frame(message, header.call_id, body if len(front) > ROOM else bytes(body), buffers)


def _receive_buffers(lengths: Sequence[int], receive: Callable[[Buffer], None]) -> list[Buffer]:
    """Take memory for one message at a time: an announcement alone costs nothing."""
    buffers: list[Buffer] = [bytearray() for _ in lengths]
    places = [index for index, length in enumerate(lengths) if length]
    for batch in batches([lengths[place] for place in places]):
        some = places[batch]
        sizes = [lengths[place] for place in some]
        memory = allocate(sum(sizes))
        receive(memory)
        pieces = [memory] if len(some) == 1 else _cut(memoryview(memory), sizes)
        for place, piece in zip(some, pieces, strict=True):
            buffers[place] = piece
    return buffers


def _cut(data: memoryview, lengths: Sequence[int]) -> Iterator[bytearray]:
    """Copies of the pieces of these lengths."""
    start = 0
    for length in lengths:
        yield bytearray(data[start : start + length])
        start += length


def announce(buffers: Sequence[Buffer]) -> list[tuple[bytes, list[OnDevice]]]:
    """Return the bytes behind the envelopes that announce buffers on a device, and the buffers."""
    found = [(index, one) for index, one in enumerate(buffers) if isinstance(one, OnDevice)]
    most = ROOM // _ANNOUNCED.size
    chunks = [found[start : start + most] for start in range(0, len(found), most)]
    return [
        (
            b"".join(_ANNOUNCED.pack(index, one.size) for index, one in chunk),
            [one for _, one in chunk],
        )
        for chunk in chunks
    ]


def announced(inline: memoryview, limits: Limits) -> dict[int, int]:
    """Return the announced sizes of buffers in bytes, by their index in the frame.

    Raises:
        BadFrame: it is none, or breaks a limit.
    """
    if len(inline) % _ANNOUNCED.size:
        raise BadFrame(f"{len(inline)} bytes announce no buffers")
    sizes = dict(_ANNOUNCED.iter_unpack(inline))
    for size in sizes.values():
        if size > limits.buffer:
            raise BadFrame(f"a buffer of {size} bytes was announced; the limit is {limits.buffer}")
    return sizes


def put_in_place(frame: Frame, on_device: Mapping[int, OnDevice]) -> None:
    """Give a frame the buffers on a device that came before it.

    Raises:
        BadFrame: it has no place for them.
    """
    buffers = list(frame.buffers)
    for index, buffer in on_device.items():
        if index >= len(buffers) or len(buffers[index]):
            raise BadFrame(f"a frame has no place for its buffer {index}, which is on a device")
        buffers[index] = buffer
    frame.buffers = buffers
