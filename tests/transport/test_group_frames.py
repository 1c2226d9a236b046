"""Frames are cut into messages of a process group, and wrong messages are refused."""

from __future__ import annotations

import random
from itertools import count

import pytest
from stations import content, request

from farcall.errors import BadFrame, LinkError
from farcall.transport.process_group import frames
from farcall.transport.process_group.frames import (
    BATCH_SIZE,
    LONE_SIZE,
    ROOM,
    batches,
    pack,
    unpack,
)
from farcall.wire.frames import DEFAULT_LIMITS, HEADER, Frame, Limits, encode
from farcall.wire.messages import Buffer


def unpacked(frame: Frame, limits: Limits = DEFAULT_LIMITS) -> Frame:
    inline, payload = pack(frame)
    coming = [bytes(message) for message in payload]

    def receive(memory: Buffer) -> None:
        memoryview(memory)[:] = coming.pop(0)  # type: ignore[index]

    front = memoryview(b"".join(inline))
    assert len(front) <= ROOM
    frame = unpack(front, bool(payload), receive, limits)
    assert coming == []
    return frame


def test_frames_of_any_sizes_come_out_as_they_went_in() -> None:
    draw = random.Random(7)
    sizes = [0, 1, 64, 4000, LONE_SIZE - 1, LONE_SIZE, ROOM, ROOM + 1, 300_000]
    for number in range(300):
        buffers = [draw.randbytes(draw.choice(sizes)) for _ in range(draw.randrange(6))]
        frame = request(number, draw.randbytes(draw.choice(sizes)), buffers)
        assert content(unpacked(frame)) == content(frame)


def test_batches_cover_all_in_order_and_are_small() -> None:
    draw = random.Random(3)
    lengths = [draw.choice([1, 30_000, LONE_SIZE, BATCH_SIZE]) for _ in range(500)]
    cut = [lengths[batch] for batch in batches(lengths)]
    assert [length for batch in cut for length in batch] == lengths
    assert all(len(batch) == 1 or sum(batch) <= BATCH_SIZE for batch in cut)


@pytest.mark.parametrize("missing", [1, 5, 100])
def test_frame_that_is_cut_short_is_refused(missing: int) -> None:
    inline, _ = pack(request(1, b"b" * 50, [b"x" * 50]))
    whole = b"".join(inline)
    with pytest.raises(BadFrame):
        unpack(memoryview(whole[:-missing]), False, lambda memory: None, DEFAULT_LIMITS)
    with pytest.raises(BadFrame):
        unpack(memoryview(whole[: HEADER.size - 1]), False, lambda memory: None, DEFAULT_LIMITS)


def test_limits_are_kept_before_anything_is_received() -> None:
    with pytest.raises(BadFrame, match="limit is 1000"):
        unpacked(request(1, b"", [bytes(100_000)]), Limits(buffer=1000))


def test_memory_is_taken_for_one_message_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a peer announces and never sends cost nothing."""
    parts = encode(request(1, b"", [bytes(100_000)] * 1000))
    taken: list[int] = []
    calls = count()

    def allocate(length: int) -> Buffer:
        taken.append(length)
        return bytearray(length)

    def receive(memory: Buffer) -> None:
        if next(calls) == 3:
            raise LinkError("the peer sends no more")

    monkeypatch.setattr(frames, "allocate", allocate)
    front = memoryview(b"".join(bytes(part) for part in parts[:2]))
    with pytest.raises(LinkError):
        unpack(front, True, receive, DEFAULT_LIMITS)
    assert taken == [100_000] * 4
