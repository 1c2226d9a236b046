"""Records of the compiled transport, as a peer sees them that is written after the description."""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from patience import PATIENCE
from sealed import keys_of
from stations import Threads

from farcall.transport.connect.keys import Keys
from farcall.wire.frames import DEFAULT_LIMITS, Frame, encode
from farcall.wire.messages import Request

pytestmark = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

LIMITS = (*DEFAULT_LIMITS, 16)
BODY = bytes(range(256)) * 1000


class Peer:
    """Seals and opens records with Python's `cryptography`, one at a time."""

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        self.sock = sock
        self._keys = [keys.sending, keys.receiving]
        self._numbers = [0, 0]
        self._encrypts = keys.encrypts

    def _next(self, direction: int) -> tuple[AESGCM, bytes]:
        number = self._numbers[direction]
        self._numbers[direction] += 1
        return AESGCM(self._keys[direction]), struct.pack(">IQ", 0, number)

    def seal(self, payload: bytes) -> bytes:
        gcm, nonce = self._next(0)
        head = struct.pack("<I", len(payload))
        if self._encrypts:
            return head + gcm.encrypt(nonce, payload, head)
        return head + payload + gcm.encrypt(nonce, b"", head + payload)

    def send(self, frame: Frame, size: int = 65536) -> None:
        data = b"".join(encode(frame))
        for start in range(0, len(data), size):
            self.sock.sendall(self.seal(data[start : start + size]))

    def receive(self, count: int) -> bytes:
        """Receive so many bytes of the stream, and the rest of their records."""
        data = b""
        while len(data) < count:
            head = self._read(4)
            (length,) = struct.unpack("<I", head)
            assert 1 <= length <= 65536
            rest = self._read(length + 16)
            gcm, nonce = self._next(1)
            if self._encrypts:
                data += gcm.decrypt(nonce, rest, head)
            else:
                gcm.decrypt(nonce, rest[length:], head + rest[:length])
                data += rest[:length]
        return data

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more
            data += more
        return data


@pytest.fixture(params=[True, False], ids=["encrypted", "authenticated"])
def linked(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Peer]]:
    """Yield an endpoint, its link, and the peer at the other end."""
    from farcall import _native  # noqa: PLC0415 -- if it was compiled

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(PATIENCE)
    endpoint = _native.Endpoint(0, 0, False, True, LIMITS)
    keys = keys_of(True, request.param)
    link = endpoint.open_stream(ours.detach(), LIMITS, 1, 1 << 20, 1 << 20, True, keys)
    link.start()
    with theirs:
        yield endpoint, link, Peer(theirs, keys_of(False, request.param))
        endpoint.close()


def next_event(endpoint: Any) -> Any:
    while (event := endpoint.next(PATIENCE)) is None:
        pass
    return event


def frame(call_id: int) -> Frame:
    return Frame(Request("module:function"), call_id, BODY, [b"x" * 70_000, b"", b"y"])


@pytest.mark.parametrize("size", [65536, 1000, 1])
def test_frames_arrive_in_records_of_any_size(
    linked: tuple[Any, Any, Peer], threads: Threads, size: int
) -> None:
    endpoint, _, peer = linked
    sent = frame(1) if size > 1 else Frame(Request("module:function"), 1, b"body", [b"buffer"])
    threads.start(peer.send, sent, size)
    event = next_event(endpoint)
    assert event[2] == 1
    assert bytes(event[4]) == sent.body
    assert [bytes(one) for one in event[5]] == [bytes(one) for one in sent.buffers]


def test_frames_go_out_in_records(linked: tuple[Any, Any, Peer]) -> None:
    _, link, peer = linked
    sent = Frame(Request("module:function"), 1, BODY[:5000], [b"x" * 9000])
    for call_id in (1, 2):
        link.send(1, call_id, b"", sent.body, sent.buffers, math.inf)
    received = peer.receive(2 * (5000 + 9000 + 32))
    assert received.count(b"x" * 9000) == 2
    assert received.count(BODY[:5000]) == 2


def test_flipped_bit_ends_the_link_and_nothing_of_the_record_is_seen(
    linked: tuple[Any, Any, Peer],
) -> None:
    endpoint, link, peer = linked
    record = bytearray(peer.seal(b"".join(encode(Frame(Request("m:f"), 1, b"body", [])))))
    record[30] ^= 1
    peer.sock.sendall(record)
    event = next_event(endpoint)
    assert event[0] == link.id
    assert "record is not authentic" in event[1]
    assert link.is_lost


@pytest.mark.parametrize("keys", [(b"short", bytes(32), True), (bytes(32), bytes(33), True)])
def test_wrong_keys_are_refused(keys: Any) -> None:
    from farcall import _native  # noqa: PLC0415 -- if it was compiled

    endpoint = _native.Endpoint(0, 0, False, True, LIMITS)
    one, other = socket.socketpair()
    with other, pytest.raises(ValueError, match="32 bytes"):
        endpoint.open_stream(one.detach(), LIMITS, 1, 1 << 20, 1 << 20, True, keys)
    endpoint.close()
