"""The messages of the handshake, and how they travel: `handshake.py` says what they mean.

A message is msgpack behind a little-endian u32 length of at most 4096 bytes, decoded into one of
four types or refused. A channel reads not a byte beyond the message it is asked for, and keeps
one deadline over all of them.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Annotated, Literal

import msgspec

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.ids import MAX_MEETINGS

PROTOCOL = "farcall"
VERSION = 1
LIMIT = 4096
NONCE_LENGTH = 32

LENGTH = struct.Struct("<I")

Code = Literal["authentication", "absent", "link"]
Count = Annotated[int, msgspec.Meta(ge=0)]
LinkName = Annotated[bytes, msgspec.Meta(max_length=NONCE_LENGTH)]
Versions = Annotated[str, msgspec.Meta(max_length=200)]
MAX_ADDRESSES = 8
Address = Annotated[str, msgspec.Meta(max_length=300)]
MeetingNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEETINGS)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class Identity(msgspec.Struct, frozen=True):
    """Who a side of a link says it is; proven when the link has a secret.

    The fields are those of the same name in `farcall.ids.Worker`, and:

    Attributes:
        shm: the version of the shared-memory protocol that it speaks; 0 for none.
        zero_copy: it lends memory over that, and takes what a peer lends.
        streams: how many connections it can use for one link; 0 or 1: one.
        link: of who dials: random bytes that name the link, if others may join it; empty if not.
        joins: of who dials: the connection is no link of its own, it joins the one of that name.
        versions: of what it runs, for people: "farcall 0.1.0, torch 2.13.0, Python 3.11.9"; or "".
        addresses: where it listens, so that the other side need not ask anybody else.
        meeting: which meeting with the other side it is ready for; see `farcall.ids`. In what a
            handshake returns: the one that both agree on.
    """

    name: str
    id: int
    incarnation: int
    host: str = ""
    main: str = ""
    shm: Count = 0
    zero_copy: bool = False
    streams: Count = 0
    link: LinkName = b""
    joins: LinkName = b""
    versions: Versions = ""
    addresses: Addresses = ()
    meeting: MeetingNumber = 0
    strict: bool = False


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """Who I am. `expects` and `expects_name`: whom I want to talk to (0, "": anyone).

    New fields go last and have defaults: a later version must be able to read an older hello, to
    say clearly that the versions differ.
    """

    protocol: str
    version: int
    name: str
    id: int
    incarnation: Count
    expects: Count
    expects_name: str
    host: str
    main: str
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_LENGTH, max_length=NONCE_LENGTH)]
    secured: bool
    shm: Count = 0
    zero_copy: bool = False
    streams: Count = 0
    link: LinkName = b""
    joins: LinkName = b""
    versions: Versions = ""
    addresses: Addresses = ()
    meeting: MeetingNumber = 0
    strict: bool = False

    @property
    def identity(self) -> Identity:
        return Identity(
            name=self.name,
            id=self.id,
            incarnation=self.incarnation,
            host=self.host,
            main=self.main,
            shm=self.shm,
            zero_copy=self.zero_copy,
            streams=self.streams,
            link=self.link,
            joins=self.joins,
            versions=self.versions,
            addresses=self.addresses,
            meeting=self.meeting,
            strict=self.strict,
        )


class Proof(msgspec.Struct, array_like=True, frozen=True, tag="proof"):
    """I know the secret: the HMAC over both hellos."""

    digest: bytes


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """I, who connected, have all I need, and use this link from now on."""


class Refuse(msgspec.Struct, array_like=True, frozen=True, tag="refuse"):
    """I don't talk to you. The last message of a handshake."""

    reason: str
    code: Code


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Hello | Proof | Ready | Refuse).decode


class Unfinished(LinkError):
    """The handshake came to no end, which says nothing about the peer: it may be alive and busy."""


class NotHere(LinkError):
    """Another worker than the one that was wanted answers at this address."""


class Ended(Unfinished):
    """The peer closed the connection before the handshake was over: it died, or gave up."""


ERRORS: dict[Code, type[LinkError]] = {
    "authentication": AuthenticationFailed,
    "absent": NotHere,
    "link": LinkError,
}
"""What a refusal raises at the side that is refused."""


class Channel:
    """Length-prefixed messages over a socket, all of them before one deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def extend(self, deadline: float) -> None:
        """Wait longer for the rest, if `deadline` is later than the one until now."""
        self._deadline = max(self._deadline, deadline)

    def send(self, message: Hello | Proof | Ready | Refuse) -> bytes:
        """Send a message; its bytes, as they are part of what is proven."""
        data = _encode(message)
        if len(data) > LIMIT:
            raise LinkError(f"this worker's own {type(message).__name__} is over {LIMIT} bytes")
        self._limit_time()
        try:
            self._sock.sendall(LENGTH.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionResetError):
            self.receive()  # it may have said why before it closed
            raise
        return data

    def part(self, seconds: float) -> None:
        """Say no more, and let the peer read what was said before the connection is closed.

        A connection that is closed with something unread is reset, and what was sent last is lost.
        """
        deadline = min(self._deadline, time.monotonic() + seconds)
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while (remaining := deadline - time.monotonic()) > 0:
                self._sock.settimeout(remaining)
                if not self._sock.recv(LIMIT):
                    return
        except OSError:
            return  # the peer is gone, or goes on talking

    def receive(self) -> tuple[Hello | Proof | Ready, bytes]:
        """Return the peer's next message and its bytes, or raise what a Refuse says."""
        prefix = self._read(LENGTH.size)
        (length,) = LENGTH.unpack(prefix)
        if not 0 < length <= LIMIT:
            raise _stranger(prefix + self._glimpse())
        data = self._read(length)
        try:
            message = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _stranger(prefix + data) from error
        if isinstance(message, Refuse):
            raise ERRORS[message.code](
                f"the peer refused this connection: {printable(message.reason)}"
            )
        return message, data

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit_time()
            piece = self._sock.recv(count - len(data))
            if not piece:
                raise Ended("the peer closed the connection during the handshake")
            data += piece
        return data

    def _limit_time(self) -> None:
        # One deadline over all reads: a limit per read would let a peer that sends a byte now and
        # then hold this thread forever.
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining)

    def _glimpse(self) -> bytes:
        """What else a stranger has sent already, for the message."""
        self._sock.settimeout(0)
        try:
            return self._sock.recv(12)
        except OSError:
            return b""


def _stranger(data: bytes) -> BadFrame:
    return BadFrame(
        f"something that is not farcall is on the other end: it sent {data[:12]!r}"
        f"{'...' if len(data) > 12 else ''}"
    )


def printable(text: str) -> str:
    """Make words of a peer that has proven nothing yet safe to show in a terminal or log."""
    return "".join(char if char.isprintable() else "?" for char in text[:1000])
