"""The byte stream of a connection: over the socket as it is, or in records where there are keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from farcall.transport.connect.keys import Keys
from farcall.transport.sockets.records import Opener, Sealer, without
from farcall.wire.messages import Buffer

MAX_VECTORS = 64

S = TypeVar("S", bound="BareSocket")


class BareSocket(Protocol):
    """The part of a connected socket that is used here."""

    def recv_into(self, memory: memoryview, /) -> int:
        """Receive as a socket's `recv_into` does."""

    def sendmsg(self, parts: Iterable[memoryview], /) -> int:
        """Send as a socket's `sendmsg` does."""


class StreamWriter(Protocol):
    """The bytes that a connection has still to send. For one thread at a time, which may write.

    Ctrl-C in a call leaves it as it was before or after one step, never in between.
    """

    def put(self, parts: Sequence[Buffer]) -> None:
        """Take the parts to be sent next; nothing is left of earlier ones."""

    def write(self) -> bool:
        """Write what the kernel takes now. Returns whether all is written; raises OSError."""


class PlainWriter:
    """See `StreamWriter`."""

    def __init__(self, sock: BareSocket) -> None:
        self._sock = sock
        self._rest: list[memoryview] = []

    def put(self, parts: Sequence[Buffer]) -> None:
        self._rest = [memoryview(part) for part in parts if len(part)]

    def write(self) -> bool:
        return _write_some(self._sock, self._rest)


class SealedWriter:
    """See `StreamWriter`. Seals a few records at a time, as the kernel takes them."""

    def __init__(self, sock: BareSocket, sealer: Sealer) -> None:
        self._sock = sock
        self._sealer = sealer
        self.put = sealer.put

    def write(self) -> bool:
        sealer = self._sealer
        while not sealer.sealed or _write_some(self._sock, sealer.sealed):
            if not sealer.seal():
                return True
        return False


class OpenedStream:
    """Reads what the peer's records carry, as if it came over a plain socket."""

    def __init__(self, sock: BareSocket, opener: Opener) -> None:
        self._sock = sock
        self._opener = opener

    @property
    def has_input(self) -> bool:
        """Return whether something can be read without a system call."""
        return self._opener.has_input

    def recv_into(self, memory: memoryview) -> int:
        """Receive what comes next, of one record at most. Return how many bytes; 0 at the end.

        Raises:
            BadFrame: the record is not what the peer sealed.
            OSError: as a socket that does not block.
        """
        opener = self._opener
        while not (count := opener.open_into(memory)):
            received = self._sock.recv_into(opener.room())
            if not received:
                break
            opener.received(received)
        return count


def writer_of(sock: BareSocket, keys: Keys | None) -> StreamWriter:
    if keys is None:
        return PlainWriter(sock)
    return SealedWriter(sock, Sealer(keys.sending, keys.encrypts))


def source_of(sock: S, keys: Keys | None) -> S | OpenedStream:
    """Return what the peer's frames are read from."""
    if keys is None:
        return sock
    return OpenedStream(sock, Opener(keys.receiving, keys.encrypts))


def _write_some(sock: BareSocket, rest: list[memoryview]) -> bool:
    """Write what the kernel takes now, and cut it off the front of `rest`.

    Ctrl-C comes before or after both, never in between; see `uninterrupted`.

    Returns:
        Whether all is written.
    """
    count = 0
    try:
        for count in iter(partial(sock.sendmsg, rest[:MAX_VECTORS]), None):  # noqa: B007
            break
    except (BlockingIOError, InterruptedError):
        return False
    try:
        left = without(rest, count)
    except BaseException:  # KeyboardInterrupt
        rest[:] = without(rest, count)
        raise
    rest[:] = left
    return not left
