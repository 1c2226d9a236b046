"""A question and its answer on a connection behind its handshake.

Each is a little-endian u32 length and as many bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from farcall.errors import BadFrame
from farcall.transport.connect.keys import Keys
from farcall.transport.sockets.streams import source_of, writer_of

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16

T = TypeVar("T")


class Exchange:
    """One side of it. For one thread, which waits.

    Args:
        sock: it is left open.
        keys: of the records; None: there are none.
        until: on `time.monotonic()`, in seconds; bounds all steps together, however small the
            pieces are in which the other side reads and writes. The attribute may be replaced.
    """

    def __init__(self, sock: socket.socket, keys: Keys | None, until: float) -> None:
        self.until = until
        bounded = _Bounded(sock, self._left)
        self._writer = writer_of(bounded, keys)
        self._source = source_of(bounded, keys)

    def send(self, data: bytes) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone, or does not read in time.
        """
        self._writer.put([_LENGTH.pack(len(data)), data])
        while not self._writer.write():
            pass

    def receive(self, most: int) -> bytearray:
        """Return the next message; memory is taken as it comes.

        Args:
            most: bytes that it may have.

        Raises:
            BadFrame: it has more.
            OSError: the other side is gone, or does not say it in time.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > most:
            raise BadFrame(f"a message of {length} bytes came where {most} may come")
        return self._read(length)

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side takes too long")
        return left

    def _read(self, length: int) -> bytearray:
        data = bytearray()
        piece = memoryview(bytearray(min(length, _PIECE)))
        while len(data) < length:
            count = self._source.recv_into(piece[: length - len(data)])
            if not count:
                raise ConnectionResetError("the other side hung up")
            data += piece[:count]
        return data


def decoded(decode: Callable[[bytearray], T], data: bytearray, what: str) -> T:
    """Return a message as `decode` makes it of bytes that anybody may have made.

    Raises:
        BadFrame: they are no `what`; the message is safe to log.
    """
    try:
        return decode(data)
    except Exception as error:  # a library raises what it likes: UnicodeDecodeError, RecursionError
        raise BadFrame(f"what came is no {what}: {type(error).__name__}") from error


class _Bounded:
    """The part of a socket that streams use, with the time that is left as the timeout."""

    def __init__(self, sock: socket.socket, left: Callable[[], float]) -> None:
        self._sock = sock
        self._left = left

    def recv_into(self, memory: memoryview) -> int:
        self._sock.settimeout(self._left())
        return self._sock.recv_into(memory)

    def sendmsg(self, parts: Iterable[memoryview]) -> int:
        self._sock.settimeout(self._left())
        return self._sock.sendmsg(parts)
