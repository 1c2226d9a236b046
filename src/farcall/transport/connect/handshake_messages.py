"""The messages of the handshake: `handshake.py` says what they mean.

A message is msgpack behind a little-endian u32 length of at most 12 KiB, decoded into one of
four types or refused.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec

from farcall.errors import AuthenticationFailed, LinkError
from farcall.ids import MAX_MEETINGS, MAX_NAME_LENGTH
from farcall.transport.connect.keys import KEY_LENGTH

PROTOCOL = "farcall"
VERSION = 1
LIMIT = 12 << 10
NONCE_LENGTH = 32
DIGEST_LENGTH = 32

LENGTH = struct.Struct("<I")

Code = Literal["authentication", "absent", "link"]
Count = Annotated[int, msgspec.Meta(ge=0)]
LinkName = Annotated[bytes, msgspec.Meta(max_length=NONCE_LENGTH)]
Versions = Annotated[str, msgspec.Meta(max_length=200)]
MAX_ADDRESSES = 10
Address = Annotated[str, msgspec.Meta(max_length=300)]
MeetingNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEETINGS)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
MAX_MEMBERSHIP = 8 << 10
Membership = Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP)]
Role = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]


class Identity(msgspec.Struct, frozen=True):
    """The identity that a side of a link claims; proven when the link has a secret.

    The fields are those of the same name in `farcall.ids.Worker`, and:

    Attributes:
        shm: the version of the shared-memory protocol that it speaks; 0 for none.
        zero_copy: over that it sends descriptors of shared memory, and maps those of a peer.
        streams: how many it can use for one link, each a connection; 0 or 1: one.
        link: of the dialler: random bytes that name the link, if others may join it; else empty.
        joins: of the dialler: the connection is no link of its own, it joins the one of that name.
        versions: of what it runs, for people: "farcall 0.1.0, torch 2.13.0, Python 3.11.9"; or "".
        addresses: where it listens, so that the other side need not ask anybody else.
        meeting: which meeting with the other side it is ready for; see `farcall.ids`. In what a
            handshake returns: the one that both agree on.
        membership: what shows that it belongs to the group: a signature, see docs/protocol.md.
        asks: of the dialler: it is no worker, and the connection no link; it asks about the worker.
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
    membership: Membership = b""
    strict: bool = False
    asks: bool = False
    role: Role = ""
    pid: Count = 0


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The sender's identity, and the worker that it wants to talk to.

    `expects`, `expects_name` and `expects_address` say that: 0 and "" are anyone and anywhere.

    `key`: this side's half of what the keys of the connection are made of; empty outside TLS.
    `encrypts`: they are to encrypt, and not only to authenticate.
    `probes`: of the dialler: it wants no link, and a proof of the secret behind the answer.

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
    key: Annotated[bytes, msgspec.Meta(max_length=KEY_LENGTH)] = b""
    encrypts: bool = True
    membership: Membership = b""
    expects_address: Address = ""
    strict: bool = False
    asks: bool = False
    role: Role = ""
    pid: Count = 0
    probes: bool = False

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
            membership=self.membership,
            strict=self.strict,
            asks=self.asks,
            role=self.role,
            pid=self.pid,
        )


class Proof(msgspec.Struct, array_like=True, frozen=True, tag="proof"):
    """I know the secret: the HMAC over both hellos."""

    digest: bytes


class DiallerReady(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """I, who connected, have all I need, and use this link from now on."""


class Refuse(msgspec.Struct, array_like=True, frozen=True, tag="refuse"):
    """I don't talk to you. The last message of a handshake."""

    reason: str
    code: Code


Message = Hello | Proof | DiallerReady | Refuse
decode = msgspec.msgpack.Decoder(Message).decode
PROOF_SIZE, READY_SIZE = (
    LENGTH.size + len(msgspec.msgpack.encode(message))
    for message in (Proof(bytes(DIGEST_LENGTH)), DiallerReady())
)


class Unfinished(LinkError):
    """The handshake came to no end, which says nothing about the peer: it may be alive and busy."""


class Unwanted(LinkError):
    """One side does not want this link, and says why: both are there."""


class NotHere(LinkError):
    """Another worker than the one that was wanted answers at this address."""


class Ended(Unfinished):
    """The peer closed the connection before the handshake was over: it died, or gave up."""


ERRORS: dict[Code, type[LinkError]] = {
    "authentication": AuthenticationFailed,
    "absent": NotHere,
    "link": Unwanted,
}
"""The error that a refusal raises at the side that is refused."""


def printable(text: str) -> str:
    """Make words of a peer that has proven nothing yet safe to show in a terminal or log."""
    if text.isprintable() and len(text) <= 1000:
        return text
    return "".join(char if char.isprintable() else "?" for char in text[:1000])
