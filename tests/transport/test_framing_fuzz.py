"""Whatever bytes come, in whatever pieces: frames, or a clear error, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stations import DIALLER_KEY as KEY
from stations import content, sealed

from farcall.errors import BadFrame, LinkError
from farcall.ids import NUMBER_BYTES
from farcall.transport.connect.keys import Keys
from farcall.transport.sockets.framing import READ_SIZE, FrameReader
from farcall.transport.sockets.records import Sealer
from farcall.transport.sockets.streams import source_of
from farcall.wire.frames import HEADER, MAGIC, VERSION, Frame, Limits, encode
from farcall.wire.messages import (
    MESSAGES,
    Accepted,
    Cancel,
    Dismiss,
    Drain,
    Drained,
    Failure,
    Leaving,
    Message,
    Pinned,
    Received,
    Reference,
    Register,
    Registered,
    Release,
    Released,
    Reply,
    Request,
)

LIMITS = Limits(meta=1 << 16, body=1 << 18, buffers=300, buffer=1 << 18, frame=1 << 20)

numbers = st.integers(0, 2**63 - 1)
small = st.integers(0, 2**31)
ref_numbers = st.binary(max_size=NUMBER_BYTES)
texts = st.text(max_size=20)
references = st.lists(
    st.builds(Reference, numbers, ref_numbers, numbers, texts, small), max_size=3
).map(tuple)


def entries(*fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(*fields), max_size=4).map(tuple)


triples = entries(numbers, ref_numbers, numbers)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Request, texts, st.floats(0, 1e6), ref_numbers, small, references),
    st.builds(Reply, references),
    st.builds(Failure, texts, texts, texts, references),
    st.builds(Register, triples),
    st.builds(Registered, entries(numbers, ref_numbers, numbers, st.booleans())),
    st.builds(Release, triples),
    st.builds(Released, triples),
    st.builds(Received, st.booleans()),
    st.builds(Pinned, st.booleans()),
    st.builds(Leaving, texts),
    st.builds(Drain, small),
    st.builds(Drained, small, small),
    st.sampled_from([Cancel(), Accepted(), Dismiss()]),
)
# Long ones are made, not drawn: their content makes no difference.
lengths = st.one_of(
    st.integers(0, 200),
    st.sampled_from([READ_SIZE + d for d in (-200, -97, -64, -33, -32, -1, 0, 1, 64)]),
    st.integers(0, 200_000),
)
blobs = st.one_of(
    st.binary(max_size=70), st.builds(lambda n: bytes(range(251)) * (n // 251), lengths)
)
buffer_lists = st.one_of(
    st.lists(blobs, max_size=4),
    st.integers(0, 200).map(lambda count: [b"%d" % (n % 13) * (n % 5) for n in range(count)]),
)
frames = st.builds(Frame, messages, st.integers(0, 2**64 - 1), blobs, buffer_lists)


@contextmanager
def stream() -> Iterator[tuple[socket.socket, socket.socket]]:
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        yield reading, writing


def received(
    data: bytes, cuts: list[int], encrypts: bool | None = None
) -> tuple[list[Frame], LinkError]:
    """Return the frames that come out of these bytes, cut at these points, and how it ends.

    Args:
        encrypts: the bytes go in records, encrypted or not; None: as they are.
    """
    found: list[Frame] = []
    edges = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    with stream() as (reading, writing):
        keys = None if encrypts is None else Keys(KEY, KEY, encrypts)
        reader = FrameReader(source_of(reading, keys), LIMITS)
        sealer = Sealer(KEY, bool(encrypts))
        try:
            for start, end in pairwise(edges):
                left = memoryview(data)[start:end]
                if encrypts is not None:
                    left = memoryview(sealed(sealer, left))
                while left:
                    left = left[writing.send(left[:60_000]) :]
                    while (frame := reader.read()) is not None:
                        found.append(frame)
            writing.close()
            while (frame := reader.read()) is not None:
                found.append(frame)
        except LinkError as error:
            return found, error
    raise AssertionError("the end of the stream was not noticed")


def wire(sent: list[Frame]) -> bytes:
    return b"".join(bytes(part) for frame in sent for part in encode(frame))


secrecy = st.sampled_from([None, True, False])
cut_points = st.lists(st.integers(0, 10**6), max_size=6)


@given(st.lists(frames, max_size=5), cut_points, secrecy)
@settings(max_examples=300, deadline=None)
def test_frames_come_out_as_they_went_in_wherever_the_stream_is_cut(
    sent: list[Frame], cuts: list[int], encrypts: bool | None
) -> None:
    found, end = received(wire(sent), cuts, encrypts)
    assert [content(frame) for frame in found] == [content(frame) for frame in sent]
    assert "the peer closed the connection" in str(end)
    assert not isinstance(end, BadFrame)


@pytest.mark.parametrize("encrypts", [None, True, False])
def test_frames_come_out_when_every_byte_comes_alone(encrypts: bool | None) -> None:
    sent = [
        Frame(Request("a:b"), 1, b"body", [b"x" * 65, b"", b"y"]),
        Frame(Reply(), 2),
        Frame(Leaving(), 3, b"", [b""]),
        Frame(Cancel(), 2**64 - 1, b"z" * 130),
    ]
    data = wire(sent)
    found, _ = received(data, list(range(len(data))), encrypts)
    assert [content(frame) for frame in found] == [content(frame) for frame in sent]


@given(st.lists(frames, min_size=1, max_size=3), st.integers(0, 10**6), cut_points, secrecy)
@settings(max_examples=200, deadline=None)
def test_stream_that_ends_early_gives_the_whole_frames_only(
    sent: list[Frame], end: int, cuts: list[int], encrypts: bool | None
) -> None:
    data = wire(sent)
    found, error = received(data[: end % len(data)], cuts, encrypts)
    assert len(found) < len(sent) or end % len(data) == 0 or not sent[-1].buffers
    assert [content(frame) for frame in found] == [content(f) for f in sent[: len(found)]]
    assert "the peer closed the connection" in str(error)


@given(st.binary(max_size=300), cut_points)
@example(b"", [])
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_a_bad_frame_or_the_end(data: bytes, cuts: list[int]) -> None:
    found, error = received(data, cuts)
    assert not found
    assert type(error) in (BadFrame, LinkError)


headers = st.builds(
    lambda kind, flags, meta, count, call, body: HEADER.pack(
        MAGIC, VERSION, kind, flags, meta, count, call, body
    ),
    st.one_of(st.sampled_from(sorted(MESSAGES)), st.integers(0, 255)),
    st.integers(0, 2**16 - 1),
    st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
    st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)),
    st.integers(0, 2**64 - 1),
    st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)),
)


@given(headers, st.binary(max_size=400), cut_points)
@settings(max_examples=200, deadline=None)
def test_random_header_and_bytes_behind_it_are_frames_or_a_clear_error(
    head: bytes, rest: bytes, cuts: list[int]
) -> None:
    _, error = received(head + rest, cuts)
    assert type(error) in (BadFrame, LinkError)


@given(frames, st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1))
@settings(max_examples=150, deadline=None)
def test_damaged_frame_never_breaks_the_reader(sent: Frame, damage: list[tuple[int, int]]) -> None:
    data = bytearray(wire([sent]))
    for place, change in damage:
        data[place % min(len(data), 200)] ^= change
    _, error = received(bytes(data), [])
    assert type(error) in (BadFrame, LinkError)


@given(st.sampled_from(sorted(MESSAGES)), st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_metadata_of_any_shape_is_a_message_or_a_bad_frame(kind: int, value: Any) -> None:
    meta = msgspec.msgpack.encode(value)
    head = HEADER.pack(MAGIC, VERSION, kind, 0, len(meta), 0, 1, 0)
    found, error = received(head + meta, [])
    if found:
        assert isinstance(found[0].message, MESSAGES[kind])  # type: ignore[index]
        assert type(error) is LinkError
    else:
        assert type(error) is BadFrame


@pytest.mark.parametrize("size", [READ_SIZE - 100, READ_SIZE, 10 * READ_SIZE])
def test_reader_that_failed_in_one_stream_leaves_others_alone(size: int) -> None:
    good = [Frame(Request("a:b"), 1, b"x" * min(size, LIMITS.body), [b"y" * 100])]
    if size > LIMITS.body:
        good[0] = Frame(Request("a:b"), 1, b"", [b"y" * LIMITS.buffer])
    _, error = received(b"\xff" * size, [])
    assert isinstance(error, BadFrame)
    found, _ = received(wire(good), [])
    assert [content(f) for f in found] == [content(f) for f in good]
