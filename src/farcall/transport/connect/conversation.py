"""One side of a handshake without I/O: it is given bytes, and says what to send and what it wants.

A *script* is a generator. It yields how many bytes it takes next, at most, and is sent some of
these: at least one, or none if the peer has closed the connection. So its driver never reads a byte
beyond the handshake. It yields 0 when the peer is proven and what follows may block: the
driver sends b"" when that may happen.

The acceptor drives many conversations in one thread; `drive` is for a thread that may block.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

import msgspec

from farcall.errors import BadFrame, LinkError
from farcall.log import get_logger
from farcall.plain import encode_msgpack
from farcall.transport.connect.handshake_messages import (
    ERRORS,
    LENGTH,
    LIMIT,
    DiallerReady,
    Ended,
    Hello,
    Message,
    Proof,
    Refuse,
    Unfinished,
    decode,
    printable,
)

logger = get_logger("farcall.transport")

PARTING_SECONDS = 1.0  # what a peer that is refused has to read why
FIRST = 16  # bytes of the first read: all first messages are longer
_SHOWN = 12  # of what a stranger sends

T = TypeVar("T")
Script = Generator[int, bytes, T]


class Stage(IntEnum):
    """The stage that the peer has reached."""

    SILENT = 0
    GREETED = 1  # its hello has come
    PROVEN = 2  # so has its proof, if there is a secret


class Refusal(Exception):
    """The words to the peer (`told`) and to the caller (`message`) by which this side gives up."""

    def __init__(self, error: type[LinkError], message: str, told: str) -> None:
        super().__init__(message)
        self.error = error
        self.message = message
        self.told = told


class Stream(Protocol):
    """Bytes to and from the peer."""

    def write(self, data: bytes) -> None:
        """Have bytes sent."""

    def read(self, count: int) -> Script[bytes]:
        """Return the next bytes, exactly as many."""


class Wire:
    """The bytes to and from the connection itself.

    Attributes:
        outgoing: bytes to be sent.
        ahead: bytes that were read and not used yet.
    """

    def __init__(self) -> None:
        self.outgoing = bytearray()
        self.ahead = b""
        self._has_begun = False

    def write(self, data: bytes) -> None:
        self.outgoing += data

    def peek(self, count: int, most: int = 0) -> Script[bytes]:
        """Return what comes next, at least so many bytes, and leave it to be read.

        Args:
            most: how many bytes may be taken at once, if more than `count`.
        """
        while len(self.ahead) < count:
            left = max(count, most) - len(self.ahead)
            piece = yield left if self._has_begun else FIRST
            self._has_begun = True
            if not piece:
                raise Ended("the peer closed the connection during the handshake")
            self.ahead += piece
        return self.ahead

    def read(self, count: int) -> Script[bytes]:
        data = yield from self.peek(count)
        self.ahead = data[count:]
        return data[:count]


class HandshakeChannel:
    """Messages of the handshake over a stream. `handshake.py` has their meaning.

    Attributes:
        stage: how far the peer has come, as the script says.
        is_known: the peer has knocked as those do who have the secret.
        is_trusted: the peer has shown that it has a credential.
    """

    def __init__(self) -> None:
        self.wire = Wire()
        self.stream: Stream = self.wire
        self.stage = Stage.SILENT
        self.is_known = False
        self.is_trusted = False

    def send(self, message: Message) -> bytes:
        """Have a message sent; return its bytes, which are part of the proof."""
        data = encode_msgpack(message)
        if len(data) > LIMIT:
            raise LinkError(f"this worker's own {type(message).__name__} is over {LIMIT} bytes")
        self.stream.write(LENGTH.pack(len(data)) + data)
        return data

    def receive(self, size: int = 0) -> Script[tuple[Hello | Proof | DiallerReady, bytes]]:
        """Return the peer's next message and its bytes, or raise what a Refuse says.

        Args:
            size: of the only message that may come here beside a Refuse, behind which nothing
                comes: so many bytes are taken at once.
        """
        if self.stream is self.wire:
            yield from self.wire.peek(LENGTH.size, size)
        prefix = yield from self.stream.read(LENGTH.size)
        (length,) = LENGTH.unpack(prefix)
        if not 0 < length <= LIMIT:
            raise stranger(prefix + self.wire.ahead)
        data = yield from self.stream.read(length)
        try:
            message = decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise stranger(prefix + data) from error
        if isinstance(message, Refuse):
            raise ERRORS[message.code](
                f"the peer refused this connection: {printable(message.reason)}"
            )
        return message, data


def stranger(data: bytes) -> BadFrame:
    """Return the error of something that is not farcall, given how it began."""
    return BadFrame(
        f"something that is not farcall is on the other end: it sent {data[:_SHOWN]!r}"
        f"{'...' if len(data) > _SHOWN else ''}"
    )


class Conversation(Generic[T]):
    """One side of one handshake. One thread at a time.

    Args:
        play: makes the script, given the channel that it uses.

    Attributes:
        wants: how many bytes it takes next, at most; 0: none, as it is over, or waits for `go_on`.
    """

    def __init__(self, play: Callable[[HandshakeChannel], Script[T]]) -> None:
        self._channel = HandshakeChannel()
        self._script = play(self._channel)
        self._results: list[T] = []
        self._failure: LinkError | None = None
        self.wants = 0
        self._step(None)

    @property
    def stage(self) -> Stage:
        """The stage that the peer has reached."""
        return self._channel.stage

    @property
    def is_known(self) -> bool:
        """Return whether the peer has knocked, which is less than a proof."""
        return self._channel.is_known

    @property
    def is_trusted(self) -> bool:
        """Return whether the peer has a credential, though it has yet to say who it is."""
        return self._channel.is_trusted

    @property
    def is_over(self) -> bool:
        """Return whether there is a result, or an error."""
        return bool(self._results) or self._failure is not None

    @property
    def failure(self) -> LinkError | None:
        """The error with which it has failed, if it has."""
        return self._failure

    def receive(self, data: bytes) -> None:
        """Hear from the peer.

        Args:
            data: at most `wants` bytes; b"": the peer has closed the connection.
        """
        self._step(data)

    def go_on(self) -> None:
        """Do what may block, now that the peer is proven."""
        self._step(b"")

    def take(self) -> bytes:
        """Return the bytes to be sent, and drop them here."""
        data = bytes(self._channel.wire.outgoing)
        self._channel.wire.outgoing.clear()
        return data

    def result(self) -> T:
        """Return what the script returned.

        Raises:
            LinkError: the handshake has failed.
        """
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _step(self, data: bytes | None) -> None:
        self.wants, refusal = 0, None
        try:
            self.wants = next(self._script) if data is None else self._script.send(data)
        except StopIteration as end:
            self._results.append(end.value)
        except Refusal as error:
            refusal = error
        except LinkError as error:
            self._failure = error
        except Exception as error:
            # Whatever bytes do to a library: they end this conversation, and no thread.
            logger.exception("an internal error in a handshake")
            self._failure = BadFrame(f"the handshake failed by an internal error: {error!r}")
        if refusal is not None:
            [code] = [code for code, error in ERRORS.items() if error is refusal.error]
            self._channel.send(Refuse(refusal.told[:1000], code))
            self._failure = refusal.error(refusal.message)


def drive(sock: socket.socket, conversation: Conversation[T], deadline: float) -> T:
    """Have a conversation over a socket, to its end; return its result.

    The socket is left open and with its timeout unchanged; on an error the caller closes it.
    Blocks the calling thread.

    Args:
        sock: a connected stream socket that no other thread reads or writes meanwhile.
        conversation: with the peer at the other end.
        deadline: on `time.monotonic()`, in seconds; bounds the whole handshake.

    Raises:
        LinkError: as the conversation says.
        Unfinished: closed, or out of time: the peer may be alive.
    """
    before = sock.gettimeout()
    try:
        _drive(sock, conversation, deadline)
        return conversation.result()
    except LinkError:
        raise
    except OSError as error:
        raise broken(error) from error
    finally:
        sock.settimeout(before)


def broken(error: OSError) -> Unfinished:
    """Return what the failure of a connection is to the handshake over it."""
    if isinstance(error, TimeoutError):
        return Unfinished("the handshake was not finished in time: the peer is silent")
    kind = Ended if isinstance(error, BrokenPipeError | ConnectionResetError) else Unfinished
    return kind(f"the connection failed during the handshake: {error}")


def _drive(sock: socket.socket, conversation: Conversation[T], deadline: float) -> None:
    unsent: OSError | None = None
    while True:
        data = conversation.take()
        if data and unsent is None:
            _limit_time(sock, deadline)
            try:
                sock.sendall(data)
            except (BrokenPipeError, ConnectionResetError) as error:
                unsent = error  # the peer may have said why before it closed
        if conversation.is_over:
            break
        if conversation.wants:
            _limit_time(sock, deadline)
            conversation.receive(sock.recv(conversation.wants))
        else:
            conversation.go_on()
    if conversation.failure is None:
        if unsent is not None:
            raise unsent
    elif data and unsent is None:
        _part(sock, min(deadline, time.monotonic() + PARTING_SECONDS))


def _limit_time(sock: socket.socket, deadline: float) -> None:
    # One deadline over all reads: a limit per read would let a peer that sends a byte now and
    # then hold this thread forever.
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    sock.settimeout(remaining)


def _part(sock: socket.socket, deadline: float) -> None:
    """Let the peer read the last message before the connection is closed.

    A connection that is closed with something unread is reset, and the last message is lost.
    """
    try:
        sock.shutdown(socket.SHUT_WR)
        while (remaining := deadline - time.monotonic()) > 0:
            sock.settimeout(remaining)
            if not sock.recv(LIMIT):
                return
    except OSError:
        return  # the peer is gone, or goes on talking
