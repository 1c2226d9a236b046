"""A question and its answer on a connection behind its handshake.

Each is a little-endian u32 length and as many bytes.
"""

from __future__ import annotations

import socket
import struct

from farcall.errors import BadFrame
from farcall.transport.connect.keys import Keys
from farcall.transport.sockets.streams import source_of, writer_of

SECONDS = 10.0
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16


class Exchange:
    """One side of it. For one thread, which waits.

    Args:
        sock: it is left open.
        keys: of the records; None: there are none.
        seconds: for each step.
    """

    def __init__(self, sock: socket.socket, keys: Keys | None, seconds: float = SECONDS) -> None:
        sock.settimeout(seconds)
        self._writer = writer_of(sock, keys)
        self._source = source_of(sock, keys)

    def send(self, data: bytes) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone, or does not read.
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
            OSError: the other side is gone, or says nothing.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > most:
            raise BadFrame(f"a message of {length} bytes where {most} may come")
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        data = bytearray()
        piece = memoryview(bytearray(min(length, _PIECE)))
        while len(data) < length:
            count = self._source.recv_into(piece[: length - len(data)])
            if not count:
                raise ConnectionResetError("the other side hung up")
            data += piece[:count]
        return data
