"""Records: the stream comes out as it went in, and altered records are refused.

`tests/records.json` has test vectors for both transports: a list of directions of a connection. Of
each, `key` is what the handshake gave it (hex), `encrypts` says whether records are encrypted,
`first` is the number of its first record here, less than 2**20, `payloads` and `records` are what
goes into each record and the record, in their order (hex).
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.errors import BadFrame
from farcall.transport.sockets import records
from farcall.transport.sockets.records import (
    BATCH_SIZE,
    MAX_PAYLOAD,
    OVERHEAD,
    REKEY_AFTER,
    Opener,
    RecordKey,
    Sealer,
)

KEY = bytes(range(32))

both = pytest.mark.parametrize("encrypts", [True, False])


class Vector(NamedTuple):
    """See this module's docstring."""

    name: str
    key: bytes
    encrypts: bool
    first: int
    payloads: list[bytes]
    records: list[bytes]


def vectors() -> list[Vector]:
    found = json.loads((Path(__file__).parents[1] / "records.json").read_text())
    return [
        Vector(
            one["name"],
            bytes.fromhex(one["key"]),
            one["encrypts"],
            one["first"],
            [bytes.fromhex(payload) for payload in one["payloads"]],
            [bytes.fromhex(record) for record in one["records"]],
        )
        for one in found
    ]


def gcm(key: bytes, number: int, text: bytes, associated: bytes) -> bytes:
    """AES-GCM by another interface, for a record or a rekeying."""
    nonce = bytes(4) + number.to_bytes(8, "big")
    encryptor = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    encryptor.authenticate_additional_data(associated)
    return encryptor.update(text) + encryptor.finalize() + encryptor.tag


def by_the_book(vector: Vector) -> list[bytes]:
    """Return the records as docs/protocol.md has them."""
    made = []
    for number, payload in enumerate(vector.payloads, vector.first):
        key = vector.key
        for _ in range(number // 2**20):
            key = gcm(key, 2**64 - 1, bytes(32), b"")[:32]
        head = struct.pack("<I", len(payload))
        if vector.encrypts:
            made.append(head + gcm(key, number, payload, head))
        else:
            made.append(head + payload + gcm(key, number, b"", head + payload))
    return made


def seal(
    payloads: Sequence[bytes], encrypts: bool, *, key: bytes = KEY, first: int = 0
) -> list[bytes]:
    """Seal a record of each."""
    sealer = Sealer(key, encrypts, first)
    return [take(sealer, [payload]) for payload in payloads]


def take(sealer: Sealer, parts: Sequence[bytes]) -> bytes:
    sealer.put(parts)
    made = b"".join(sealer.sealed)
    while sealer.seal():
        made += b"".join(sealer.sealed)
    return made


def opened(opener: Opener, data: bytes, room: Sequence[int] = (100_000,)) -> bytes:
    """Return the payloads of records that arrive in one piece, into memories of these sizes."""
    found = bytearray()
    sizes = cycle(room)
    while True:
        count = receive(opener, data)
        data = data[count:]
        memory = memoryview(bytearray(next(sizes)))
        while filled := opener.open_into(memory):
            found += memory[:filled]
            memory = memoryview(bytearray(next(sizes)))
        if not data:
            return bytes(found)


def receive(opener: Opener, data: bytes) -> int:
    """Have it receive what it has room for."""
    space = opener.room()
    count = min(len(space), len(data))
    space[:count] = data[:count]
    opener.received(count)
    return count


def outcome(data: bytes, encrypts: bool) -> tuple[bytes, bool]:
    """Return the payloads before the end, and whether that is an error."""
    opener, found = Opener(KEY, encrypts), b""
    assert receive(opener, data) == len(data)
    memory = memoryview(bytearray(MAX_PAYLOAD))
    try:
        while filled := opener.open_into(memory):
            found += bytes(memory[:filled])
    except BadFrame:
        return found, True
    return found, False


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector.name)
@pytest.mark.parametrize("fills_memory", [True, False], ids=["into memory", "by older libraries"])
def test_vectors(vector: Vector, fills_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fills_memory:
        monkeypatch.setattr(records, "_fills_memory", lambda cipher: False)
    assert by_the_book(vector) == vector.records
    assert seal(vector.payloads, vector.encrypts, key=vector.key, first=vector.first) == (
        vector.records
    )
    opener = Opener(vector.key, vector.encrypts, vector.first)
    assert opened(opener, b"".join(vector.records)) == b"".join(vector.payloads)


def test_vectors_have_both_kinds_and_a_new_key_of_each() -> None:
    ends = {(one.encrypts, one.first + len(one.payloads) > REKEY_AFTER) for one in vectors()}
    assert ends == {(True, True), (True, False), (False, True), (False, False)}


lengths = st.one_of(
    st.integers(0, 200),
    st.sampled_from([MAX_PAYLOAD + d for d in (-1, 0, 1)]),
    st.integers(0, 3 * MAX_PAYLOAD),
)
contents = st.builds(
    lambda n, b: bytes([b, b ^ 1, 7] * (n // 3 + 1))[:n], lengths, st.integers(0, 255)
)


@given(
    st.lists(st.lists(contents, max_size=5), max_size=3),
    st.lists(st.integers(0, 10**6), max_size=5),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_stream_comes_out_as_it_went_in(
    puts: list[list[bytes]], cuts: list[int], room: list[int], encrypts: bool, fills_memory: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_fills_memory", lambda cipher: fills_memory)
        sealer, opener = Sealer(KEY, encrypts), Opener(KEY, encrypts)
        data = b"".join(take(sealer, parts) for parts in puts)
        edges = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
        found = b"".join(opened(opener, data[a:b], room) for a, b in pairwise(edges))
    assert found == b"".join(part for parts in puts for part in parts)
    assert not opener.has_input


def test_no_more_is_sealed_at_a_time_than_a_batch() -> None:
    sealer = Sealer(KEY, encrypts=True)
    sealer.put([bytes(1 << 20)])
    assert not sealer.sealed
    assert sealer.seal()
    assert sum(map(len, sealer.sealed)) == BATCH_SIZE


def test_small_parts_share_a_record() -> None:
    assert len(take(Sealer(KEY, encrypts=True), [b"a"] * 1000)) == 1000 + OVERHEAD


@both
def test_every_flipped_bit_is_refused(encrypts: bool) -> None:
    first, second = seal([b"first", b"second record"], encrypts)
    for bit in range(8 * len(second)):
        altered = bytearray(second)
        altered[bit // 8] ^= 1 << bit % 8
        found, is_refused = outcome(first + altered + bytes(MAX_PAYLOAD), encrypts)
        assert (found, is_refused) == (b"first", True), bit


@both
def test_every_truncation_gives_only_whole_records(encrypts: bool) -> None:
    first, second = seal([b"first", b"second"], encrypts)
    whole = first + second
    for end in range(len(whole)):
        found, is_refused = outcome(whole[:end], encrypts)
        assert found == (b"first" if end >= len(first) else b"")
        assert not is_refused
        # A cut in the middle is noticed with the next record.
        if end:
            assert outcome(whole[:end] + whole + bytes(MAX_PAYLOAD), encrypts) == (found, True)


@given(st.lists(st.integers(0, 5), max_size=8), st.booleans())
@settings(max_examples=300, deadline=None)
def test_records_left_out_repeated_or_in_another_order_are_refused(
    order: list[int], encrypts: bool
) -> None:
    payloads = [b"payload %d" % n for n in range(6)]
    made = seal(payloads, encrypts)
    found, is_refused = outcome(b"".join(made[n] for n in order), encrypts)
    kept = next((n for n, place in enumerate(order) if n != place), len(order))
    assert found == b"".join(payloads[:kept])
    assert is_refused == (kept < len(order))


@both
def test_ten_thousand_altered_records_are_refused(encrypts: bool) -> None:
    drawn = random.Random(25)
    payloads = [drawn.randbytes(n) for n in (1, 33, 200, 1000)]
    originals = {payload: seal([payload], encrypts)[0] for payload in payloads}
    other_key = {payload: seal([payload], encrypts, key=bytes(32))[0] for payload in payloads}
    other_kind = {payload: seal([payload], not encrypts)[0] for payload in payloads}
    accepted = 0
    for turn in range(10_000):
        payload = payloads[turn % 4]
        altered = bytearray(originals[payload])
        match turn // 4 % 5:
            case 0:
                altered[drawn.randrange(len(altered))] ^= drawn.randrange(1, 256)
            case 1:
                altered[-16:] = drawn.randbytes(16)
            case 2:
                altered[4:] = drawn.randbytes(len(altered) - 4)
            case 3:
                altered = bytearray(drawn.choice([other_key, other_kind])[payload])
            case 4:
                a, b = sorted(drawn.sample(range(len(altered) + 1), 2))
                altered[a:b] = drawn.randbytes(drawn.randrange(40))
        if altered != originals[payload]:
            accepted += bool(outcome(bytes(altered) + bytes(MAX_PAYLOAD), encrypts)[0])
    assert accepted == 0


@both
@pytest.mark.parametrize("length", [0, MAX_PAYLOAD + 1, 2**32 - 1])
def test_length_that_no_record_has_is_refused_at_once(length: int, encrypts: bool) -> None:
    assert outcome(struct.pack("<I", length), encrypts) == (b"", True)


def test_record_of_no_bytes_is_refused_even_if_the_peer_has_sealed_it() -> None:
    record = RecordKey(KEY, encrypts=True).seal(0, b"")
    assert outcome(record, encrypts=True) == (b"", True)


@both
def test_bytes_before_a_bad_record_are_given_first_and_the_error_stays(encrypts: bool) -> None:
    opener = Opener(KEY, encrypts)
    first, second = seal([b"good", b"bad"], encrypts)
    data = first + second[:-1] + b"\0"
    receive(opener, data)
    memory = memoryview(bytearray(3))
    assert (opener.open_into(memory), opener.open_into(memory)) == (3, 1)
    for _ in range(2):
        assert opener.has_input
        with pytest.raises(BadFrame, match=r"record 1 .* altered"):
            opener.open_into(memory)


@both
def test_each_direction_and_kind_has_records_of_its_own(encrypts: bool) -> None:
    (record,) = seal([b"payload"], encrypts, key=bytes(32))
    assert outcome(record, encrypts) == (b"", True)
    (record,) = seal([b"payload"], encrypts)
    assert outcome(record, not encrypts) == (b"", True)


@pytest.mark.parametrize("calls", range(4))
def test_batch_whose_sealing_ctrl_c_ends_is_sealed_again(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(25).randbytes(3 * MAX_PAYLOAD + 5)
    sealer = Sealer(KEY, encrypts=True)
    before = take(sealer, [b"before"])
    sealer.put([data])
    seal_into, left = RecordKey.seal_into, [calls]

    def interrupted(key: RecordKey, number: int, payload: bytes, memory: memoryview) -> int:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return seal_into(key, number, payload, memory)

    with monkeypatch.context() as patch:
        patch.setattr(RecordKey, "seal_into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sealer.seal()
    made = before
    while sealer.seal():
        made += b"".join(sealer.sealed)
    assert opened(Opener(KEY, encrypts=True), made) == b"before" + data


def test_key_is_not_shown() -> None:
    for thing in (RecordKey(KEY, encrypts=True), Sealer(KEY, True), Opener(KEY, True)):
        assert KEY.hex()[:8] not in repr(thing)
        assert repr(KEY)[2:10] not in repr(thing)
