"""Records: what carries a link's byte stream where the handshake has left keys. No I/O here.

A record is

    length       u32, little-endian: bytes of the payload, 1 to 65536
    payload      encrypted; with `encrypts=False` the bytes of the stream themselves
    tag          16 bytes, of AES-256-GCM

The format, and what it is good for, is in docs/protocol.md, section "Records".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from farcall.errors import BadFrame
from farcall.wire.messages import Buffer

MAX_PAYLOAD = 1 << 16
TAG_LENGTH = 16
LENGTH = struct.Struct("<I")
OVERHEAD = LENGTH.size + TAG_LENGTH
REKEY_AFTER = 1 << 20  # records
BATCH = 6  # records that are sealed, or received, at a time
BATCH_SIZE = BATCH * (MAX_PAYLOAD + OVERHEAD)

_length_at = LENGTH.unpack_from
_nonce = struct.Struct(">IQ").pack  # 0 and the number of the record
_REKEY_NUMBER = 2**64 - 1  # no record has it


class RecordKey:
    """The key of one direction for `REKEY_AFTER` records. Immutable.

    Args:
        key: 32 bytes.
        encrypts: records are encrypted; else they are authenticated only.
    """

    __slots__ = ("_cipher", "_encrypts", "_fills_memory", "_key", "_wrong")

    def __init__(self, key: bytes, encrypts: bool) -> None:
        # Here, since the import takes long, and links within a host have no records.
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

        self._key = key
        self._encrypts = encrypts
        self._cipher = AESGCM(key)
        self._fills_memory = _fills_memory(self._cipher)
        self._wrong = InvalidTag

    def __repr__(self) -> str:
        return f"RecordKey(encrypts={self._encrypts})"

    def following(self) -> RecordKey:
        """Return the key of the next `REKEY_AFTER` records."""
        fresh = self._cipher.encrypt(_nonce(0, _REKEY_NUMBER), bytes(len(self._key)), b"")
        return RecordKey(fresh[: len(self._key)], self._encrypts)

    def seal(self, number: int, payload: Buffer) -> bytes:
        """Return the record of this number, counted from 0."""
        head = LENGTH.pack(len(payload))
        if self._encrypts:
            return head + self._cipher.encrypt(_nonce(0, number), payload, head)
        data = b"".join((head, payload))
        return data + self._cipher.encrypt(_nonce(0, number), b"", data)

    def seal_into(self, number: int, payload: Buffer, memory: memoryview) -> int:
        """Write the record to the front of `memory`. Return how many bytes it has."""
        length = len(payload)
        size = length + OVERHEAD
        if self._encrypts and self._fills_memory:
            head = memory[: LENGTH.size] = LENGTH.pack(length)
            record = memory[LENGTH.size : size]
            self._cipher.encrypt_into(_nonce(0, number), payload, head, record)
        elif self._encrypts:
            memory[:size] = self.seal(number, payload)
        else:
            memory[: LENGTH.size] = LENGTH.pack(length)
            memory[LENGTH.size : size - TAG_LENGTH] = payload
            tag = self._cipher.encrypt(_nonce(0, number), b"", memory[: size - TAG_LENGTH])
            memory[size - TAG_LENGTH : size] = tag
        return size

    def open_into(self, number: int, record: memoryview, memory: memoryview) -> None:
        """Write the payload of a record to `memory`, which is as long as that.

        Raises:
            BadFrame: this is not what the peer sealed as its record of this number. What `memory`
                has is worth nothing then.
        """
        try:
            if not self._encrypts:
                end = len(record) - TAG_LENGTH
                self._cipher.decrypt(_nonce(0, number), record[end:], record[:end])
                memory[:] = record[LENGTH.size : end]
            elif self._fills_memory:
                head, sealed = record[: LENGTH.size], record[LENGTH.size :]
                self._cipher.decrypt_into(_nonce(0, number), sealed, head, memory)
            else:
                head, sealed = record[: LENGTH.size], record[LENGTH.size :]
                memory[:] = self._cipher.decrypt(_nonce(0, number), sealed, head)
        except self._wrong:
            raise BadFrame(
                f"record {number} of the connection is not as the peer sealed it: it was altered, "
                "left out, repeated or put in another place on its way"
            ) from None


def _fills_memory(cipher: object) -> bool:
    """Return whether a cipher can write to memory that is there: from `cryptography` 47 on."""
    return hasattr(cipher, "encrypt_into")


class Sealer:
    """Makes records of the bytes that one side sends.

    Ctrl-C may end any call in here. Then the call has been made or it has not: all that changes is
    one attribute, once. A batch that was sealed but not kept was not sent, so that its numbers are
    still free.

    Args:
        key: 32 bytes, of this direction.
        encrypts: records are encrypted; else they are authenticated only.
        number: of the first record; not 0 in tests only.
    """

    def __init__(self, key: bytes, encrypts: bool, number: int = 0) -> None:
        # The key and the number of the next record, the parts to be sealed, and the sealed ones.
        self._state: _Sealing = RecordKey(key, encrypts), number, [], []
        self._memory: memoryview | None = None

    def put(self, parts: Sequence[Buffer]) -> None:
        """Take the bytes that come next; all before them have been sealed and sent."""
        key, number, _, _ = self._state
        if len(parts) == 1 and 0 < len(parts[0]) <= MAX_PAYLOAD:  # at once: most are so
            sealed = memoryview(key.seal(number, parts[0]))
            number += 1
            key = key if number % REKEY_AFTER else key.following()
            self._state = key, number, [], [sealed]
        else:
            self._state = key, number, [memoryview(part) for part in parts if len(part)], []

    @property
    def sealed(self) -> list[memoryview]:
        """The bytes to be sent now. The sender takes those that it has sent out of this list."""
        return self._state[3]

    def seal(self) -> bool:
        """Seal more, when all of `sealed` has been sent; return False if there is no more."""
        key, number, parts, _ = self._state
        if not parts:
            return False
        if self._memory is None:
            self._memory = memoryview(bytearray(BATCH_SIZE))
        used = 0
        for _ in range(BATCH):
            payload, parts = _payload_of(parts)
            used += key.seal_into(number, payload, self._memory[used:])
            number += 1
            key = key if number % REKEY_AFTER else key.following()
            if not parts:
                break
        self._state = key, number, parts, [self._memory[:used]]
        return True


_Sealing = tuple[RecordKey, int, list[memoryview], list[memoryview]]


def _payload_of(parts: list[memoryview]) -> tuple[Buffer, list[memoryview]]:
    """Return the payload of the next record, and what comes behind it. Small parts are joined."""
    first = parts[0]
    if len(first) >= MAX_PAYLOAD:
        return first[:MAX_PAYLOAD], without(parts, MAX_PAYLOAD)
    room, end = MAX_PAYLOAD, 0
    while end < len(parts) and len(parts[end]) <= room:
        room -= len(parts[end])
        end += 1
    joined, left = parts[:end], parts[end:]
    if left and room:
        joined.append(left[0][:room])
        left[0] = left[0][room:]
    return b"".join(joined), left


def without(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what follows the first `count` bytes of these."""
    done = 0
    while done < len(parts) and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    left = parts[done:]
    if count:
        left[0] = left[0][count:]
    return left


class Opener:
    """Takes the records of one peer apart.

    Bytes that arrive go into `room`, for `received` to say how much that was; `open_into` then
    gives the bytes of the stream.

    Args:
        key: 32 bytes, of this direction.
        encrypts: records are encrypted; else they are authenticated only.
        number: of the first record; not 0 in tests only.
    """

    def __init__(self, key: bytes, encrypts: bool, number: int = 0) -> None:
        self._key = RecordKey(key, encrypts)
        self._number = number
        self._memory = memoryview(bytearray(BATCH_SIZE))
        self._start = 0  # of the records that were not opened yet
        self._end = 0
        self._opened = memoryview(b"")  # of the last record, for which there was no room

    @property
    def has_input(self) -> bool:
        """Return whether `open_into` has something to give, if only an error."""
        there = self._end - self._start
        if self._opened or there < LENGTH.size:
            return len(self._opened) > 0
        (length,) = _length_at(self._memory, self._start)
        return not 1 <= length <= MAX_PAYLOAD or there >= length + OVERHEAD

    def room(self) -> memoryview:
        """Return memory for what arrives next; there is always some when no record is whole."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            left = self._end - self._start
            self._memory[:left] = self._memory[self._start : self._end]  # they may overlap
            self._start, self._end = 0, left
        return self._memory[self._end :]

    def received(self, count: int) -> None:
        """Note that so many bytes were written to the front of `room`."""
        self._end += count

    def open_into(self, memory: memoryview) -> int:
        """Write what comes next to the front of this: of one record, or the rest of one.

        Returns:
            How many bytes were written; 0 if no record is whole.

        Raises:
            BadFrame: the next record is not what the peer sealed.
        """
        if self._opened:
            count = min(len(memory), len(self._opened))
            memory[:count] = self._opened[:count]
            self._opened = self._opened[count:]
            return count
        start = self._start
        there = self._end - start
        if there < LENGTH.size:
            return 0
        (length,) = _length_at(self._memory, start)
        if not 1 <= length <= MAX_PAYLOAD:
            raise BadFrame(
                f"record {self._number} of the connection claims {length} bytes; records have 1 to "
                f"{MAX_PAYLOAD}"
            )
        end = start + OVERHEAD + int(length)
        if self._end < end:
            return 0
        fits = length <= len(memory)
        opened = memory[:length] if fits else memoryview(bytearray(length))
        self._key.open_into(self._number, self._memory[start:end], opened)
        self._start = end
        self._number += 1
        if not self._number % REKEY_AFTER:
            self._key = self._key.following()
        if fits:
            return len(opened)
        self._opened = opened
        return self.open_into(memory)
