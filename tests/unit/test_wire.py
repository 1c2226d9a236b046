"""Frames: decoding inverts encoding, and every length is checked before it is believed."""

from __future__ import annotations

import struct

import pytest

from farcall.errors import BadFrame, SerializationError
from farcall.wire import frames
from farcall.wire.frames import (
    ALIGNMENT,
    DEFAULT_LIMITS,
    HEADER,
    MAGIC,
    VERSION,
    Frame,
    Header,
    Limits,
    decode_header,
    decode_table,
    encode,
    padding,
)
from farcall.wire.messages import (
    KINDS,
    MESSAGES,
    Cancel,
    Failure,
    Kind,
    Leaving,
    OnDevice,
    Reference,
    Register,
    Reply,
    Request,
    decode_message,
    encode_message,
)

REFERENCE = Reference(1 << 62, b"0123456789abcdef", 1 << 61, "owner", 3)


def joined(frame: Frame) -> bytes:
    return b"".join(bytes(part) for part in encode(frame))


def packed(
    magic: bytes = MAGIC, version: int = VERSION, kind: int = Kind.REQUEST, meta: int = 0,
    count: int = 0, body: int = 0,
) -> bytes:  # fmt: skip
    return HEADER.pack(magic, version, kind, 0, meta, count, 0, body)


def test_header_is_32_bytes_and_kinds_keep_their_numbers() -> None:
    assert HEADER.size == 32
    in_order = [
        "REQUEST", "REPLY", "FAILURE", "CANCEL", "ACCEPTED", "REGISTER", "REGISTERED", "RELEASE",
        "RELEASED", "RECEIVED", "LEAVING", "DRAIN", "DRAINED", "DISMISS", "PINNED",
        "RELEASE_CONTEXT", "HOLD_CONTEXT", "GRADIENTS", "CREDIT_RETURNED", "PASS_FAILED", "CROWDED",
        "WHO_IS", "THIS_IS",
    ]  # fmt: skip
    assert [kind.name for kind in Kind] == in_order, "append a new name here, and never renumber"
    assert [int(kind) for kind in Kind] == list(range(1, len(Kind) + 1))
    assert set(MESSAGES) == set(Kind), "each Kind has a line in MESSAGES of wire/messages.py"
    assert {KINDS[message]: message for message in MESSAGES.values()} == MESSAGES


@pytest.mark.parametrize(
    "message",
    [
        Request("module:qualname", 2.5, b"7", 8, (REFERENCE, REFERENCE)),
        Request(""),
        Reply((REFERENCE,)),
        Failure("builtins.ValueError", "no", "Traceback ...", (REFERENCE,)),
        Register(((1, b"2", 3), (1 << 63, b"5", 6))),
        Leaving("enough"),
        Cancel(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_message_comes_back(message: Request) -> None:
    data = joined(Frame(message, 99, b"body"))
    header = decode_header(data)
    assert header.kind is KINDS[type(message)]
    assert (header.call_id, header.body_length, header.buffer_count) == (99, 4, 0)
    meta = data[HEADER.size : HEADER.size + header.meta_length]
    assert decode_message(header.kind, meta) == message
    assert data[-4:] == b"body"


def test_fields_that_a_later_version_adds_are_ignored_and_missing_ones_have_defaults() -> None:
    later = b"\x9b\xa1f\x00\xc4\x00\x00\x90\x00\x00\xc2\xc2\x01\xc0"
    assert decode_message(Kind.REQUEST, later) == Request("f")
    assert decode_message(Kind.REQUEST, b"\x91\xa1f") == Request("f")


@pytest.mark.parametrize("lengths", [[1], [0], [0, 0, 5], [64, 1, 63, 65], [1000] * 70])
@pytest.mark.parametrize("body", [b"", b"b", b"b" * 40_000])
def test_buffers_begin_at_multiples_of_the_alignment(lengths: list[int], body: bytes) -> None:
    buffers = [bytes([65 + index % 26]) * length for index, length in enumerate(lengths)]
    data = joined(Frame(Reply(), 1, body, buffers))
    header = decode_header(data)
    table = data[HEADER.size : HEADER.size + header.table_length]
    assert decode_table(header, table) == lengths
    offset = HEADER.size + header.front_length
    assert data[offset - len(body) : offset] == body
    for buffer in buffers:
        offset += padding(offset)
        assert offset % ALIGNMENT == 0
        assert data[offset : offset + len(buffer)] == buffer
        offset += len(buffer)
    assert offset == len(data)


def test_large_parts_are_passed_on_and_not_copied() -> None:
    body, buffer = b"b" * 100_000, memoryview(bytearray(100_000))
    parts = encode(Frame(Reply(), 1, body, [buffer]))
    assert any(part is body for part in parts)
    assert any(part is buffer for part in parts)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (packed(magic=b"GET "), "not a farcall frame: it starts with b'GET '"),
        (packed(version=2), "frame version 2; this farcall speaks version 1"),
        (packed(kind=0), "unknown frame kind 0"),
        (packed(kind=max(Kind) + 1), f"unknown frame kind {max(Kind) + 1}"),
        (packed(meta=(64 << 20) + 1), "claims 67108865 bytes of metadata; the limit is 67108864"),
        (packed(count=(1 << 20) + 1), "claims 1048577 buffers; the limit is 1048576"),
        (packed(body=1 << 60), "claims a body of 1152921504606846976 bytes"),
    ],
)
def test_header_that_lies_is_refused_with_its_claim(data: bytes, complaint: str) -> None:
    with pytest.raises(BadFrame, match=complaint):
        decode_header(data)


def test_a_header_at_the_limit_passes() -> None:
    limits = DEFAULT_LIMITS
    header = decode_header(packed(meta=limits.meta, count=limits.buffers, body=limits.body))
    assert (header.meta_length, header.body_length) == (limits.meta, limits.body)


@pytest.mark.parametrize(
    ("body", "lengths", "complaint"),
    [
        (0, [101], "claims 101 bytes for buffer 0; the limit is 100"),
        (0, [1, 1 << 60], "bytes for buffer 1"),
        (0, [100, 100, 1], "claims 201 bytes in all; the limit is 200"),
        (101, [100], "claims 201 bytes in all"),
        (0, [(1 << 64) - 1], "claims 18446744073709551615 bytes for buffer 0"),
    ],
)
def test_table_that_lies_is_refused(body: int, lengths: list[int], complaint: str) -> None:
    header = Header(Kind.REPLY, 0, 0, len(lengths), 0, body)
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    with pytest.raises(BadFrame, match=complaint):
        decode_table(header, table, Limits(buffer=100, frame=200))


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x91\x05",
        b"\x92\xa1f\xa1f",
        b"\xa1f",
        b"\x91\xa1\xff",  # text that is not UTF-8
        b"\x96\xa1f\x00\xc4\x00\x00\x90" + b"\x91" * 100_000,  # very deep
        b"\x93\xa1f\x00\xc4\x11" + b"n" * 17,  # a reference's number has 16 bytes at most
    ],
)
def test_metadata_that_is_no_request_is_refused(meta: bytes) -> None:
    with pytest.raises(BadFrame, match="broken REQUEST message"):
        decode_message(Kind.REQUEST, meta)


def test_frame_shows_its_sizes_and_not_its_contents() -> None:
    frame = Frame(Cancel(), 3, b"x" * 1000, [b"y" * 10, b""])
    cancel = "Cancel(by_user=False, waits=False)"
    assert repr(frame) == f"Frame({cancel}, call_id=3, body=1000 bytes, buffers=[10, 0])"


# All above what a sender need not look at.
SMALL = Limits(meta=100_000, body=50_000, buffers=40, buffer=60_000, frame=90_000)
TEXT = 100_000 - len(encode_message(Leaving("x" * 99_000))) + 99_000
AT_LIMIT = {
    "meta": Frame(Leaving("x" * TEXT)),
    "body": Frame(Reply(), body=bytes(50_000)),
    "buffers": Frame(Reply(), buffers=[b""] * 40),
    "buffer": Frame(Reply(), buffers=[bytes(60_000)]),
    "frame": Frame(Reply(), body=bytes(10_000), buffers=[bytes(40_000)] * 2),
}
ABOVE_LIMIT = {
    "meta": Frame(Leaving("x" * (TEXT + 1))),
    "body": Frame(Reply(), body=bytes(50_001)),
    "buffers": Frame(Reply(), buffers=[b""] * 41),
    "buffer": Frame(Reply(), buffers=[bytes(60_001)]),
    "frame": Frame(Reply(), body=bytes(10_001), buffers=[bytes(40_000)] * 2),
}


def received(data: bytes, limits: Limits) -> None:
    """Check the limits of a frame as a receiver does."""
    header = decode_header(data, limits)
    decode_table(header, data[HEADER.size :][: header.table_length], limits)


def test_frames_at_and_above_the_limits_are_there_for_each_limit() -> None:
    assert set(AT_LIMIT) == set(ABOVE_LIMIT) == set(Limits._fields)


@pytest.mark.parametrize("limit", Limits._fields)
def test_a_sender_refuses_frames_that_a_receiver_would_refuse(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked = joined(ABOVE_LIMIT[limit])
    with pytest.raises(BadFrame, match=f"the limit is {getattr(SMALL, limit)}"):
        received(unchecked, SMALL)
    monkeypatch.setattr(frames, "SENDING_LIMITS", SMALL)
    received(joined(AT_LIMIT[limit]), SMALL)
    with pytest.raises(SerializationError, match=f"the limit is {getattr(SMALL, limit)}"):
        encode(ABOVE_LIMIT[limit])


def test_fields_in_one_string_break_no_limit() -> None:
    limits = frames.SENDING_LIMITS
    assert min(limits.meta, limits.body, limits.frame) >= frames.JOINED_SIZE
    assert limits == DEFAULT_LIMITS


def test_a_buffer_on_a_device_counts_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SENDING_LIMITS", SMALL)
    encode(Frame(Reply(), buffers=[OnDevice(None, 60_000)]))
    with pytest.raises(SerializationError, match="60001 bytes in one buffer"):
        encode(Frame(Reply(), buffers=[OnDevice(None, 60_001)]))


def test_metadata_of_more_than_a_header_can_say_is_refused() -> None:
    with pytest.raises(SerializationError, match="the request can't be sent"):
        frames.check_size(Request("f"), 1 << 33, 0, ())
