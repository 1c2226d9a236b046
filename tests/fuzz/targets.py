"""The readers of a peer's bytes, in Python: a function for each, and bytes to begin with.

A target takes any bytes. It raises nothing: what the reader may raise for bytes that make no sense
is caught, by name. The result is used as a program would: compared, hashed, shown, dropped.

To add a reader: a function under `@target`, whose seeds are what an honest peer sends.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy
import torch
from torch.distributed import HashStore

from farcall.errors import BadFrame, LinkError, Refused, SerializationError
from farcall.ids import Worker
from farcall.plain import encode_msgpack
from farcall.runtime.membership.records import (
    CONFIRMATION,
    GATE,
    RECORD,
    WORKER,
    Confirmation,
    GateOutcome,
    Record,
)
from farcall.runtime.membership.signed_store import SignedStore
from farcall.runtime.membership.signing import SecretSigner, Signer, Unsigned
from farcall.serde import Only, Serializer, dump_failure, load_failure
from farcall.transport.connect.conversation import Conversation
from farcall.transport.connect.credentials import SecretCertificates, Terms
from farcall.transport.connect.handshake import Wanted, accepting, greet
from farcall.transport.connect.handshake_messages import (
    LENGTH,
    DiallerReady,
    Hello,
    Identity,
    Proof,
    Refuse,
)
from farcall.transport.process_group import channel, frames, link
from farcall.transport.sockets.framing import READ_SIZE, FrameReader
from farcall.wire.frames import Frame, Limits, encode
from farcall.wire.messages import (
    KINDS,
    Accepted,
    Cancel,
    CreditReturned,
    Crowded,
    Dismiss,
    Drain,
    Drained,
    Failure,
    Gradients,
    HoldContext,
    Kind,
    Leaving,
    Message,
    OnDevice,
    PassFailed,
    Pinned,
    Received,
    Reference,
    Register,
    Registered,
    Release,
    ReleaseContext,
    Released,
    Reply,
    Request,
    ThisIs,
    WhoIs,
    decode_message,
    encode_message,
)

LIMITS = Limits(meta=1 << 16, body=1 << 18, buffers=300, buffer=1 << 18, frame=1 << 20)
"""Small, so that a frame which claims much is refused and takes no time."""

sys.path.append(str(Path(__file__).parents[1]))
from authorities import KEYS, Authority  # noqa: E402  of the tests

ZEROS = 80_000


class Target(NamedTuple):
    """One reader.

    Attributes:
        run: takes the bytes. Whatever it raises is a finding.
        seeds: makes bytes that are as they should be.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


TARGETS: dict[str, Target] = {}


def target(seeds: Callable[[], Iterable[bytes]]) -> Callable[[Callable[[bytes], None]], None]:
    """Add a target, under the name of its function."""

    def add(run: Callable[[bytes], None]) -> None:
        TARGETS[run.__name__] = Target(run, seeds)

    return add


def use(value: object) -> None:
    """Do with the result what programs do with values.

    A value that can't be hashed or compared says so by a TypeError, a tensor by a RuntimeError.
    """
    with contextlib.suppress(TypeError):
        hash(value)
    with contextlib.suppress(TypeError, RuntimeError):
        bool(value == value)  # noqa: PLR0124  what it is compared with does not matter
    repr(value)
    del value


class Wire:
    """A socket from which the bytes of a peer come in pieces, then zeros, and then the end.

    So an input need not be long where much has to come.
    """

    def __init__(self, data: bytes, piece: int = READ_SIZE, zeros: int = 0) -> None:
        self._stream = io.BytesIO(data + bytes(zeros))
        self._piece = piece

    def recv_into(self, memory: memoryview) -> int:
        return self._stream.readinto(memoryview(memory)[: self._piece])

    def recvmsg_into(self, memories: list[memoryview]) -> tuple[int]:
        return (self.recv_into(memories[0]),)


# The handshake.


def handshakes() -> Iterable[bytes]:
    worker = ("farcall", 1, "w1", 1, 7, 0, "", "host", "main", bytes(32), True)
    hellos = (
        Hello(*worker),
        Hello(*worker, 3, True, 4, bytes(16), bytes(16), "farcall 0.1", ("tcp://h:1",), 2),
    )
    for first in (0, 1, 2):
        for message in (*hellos, Proof(bytes(32)), DiallerReady(), Refuse("no", "link")):
            data = msgspec.msgpack.encode(message)
            yield bytes([first]) + LENGTH.pack(len(data)) + data
    tls = Conversation(lambda channel: greet(channel, US, TERMS[2], Wanted()))
    yield b"\2" + tls.take()


TERMS = (
    Terms(),
    Terms(bytes(range(32))),
    Terms(bytes(range(32)), SecretCertificates(bytes(range(32)))),
)
US = Identity("w0", 0, 9, "host")


@target(handshakes)
def handshake(data: bytes) -> None:
    if not data:
        return
    terms = TERMS[data[0] % len(TERMS)]
    conversation = accepting(US, terms, admit=use)
    stream = io.BytesIO(data[1:])
    while not conversation.is_over:
        if conversation.wants:
            conversation.receive(stream.read(conversation.wants))
        else:
            conversation.go_on()
        conversation.take()
    with contextlib.suppress(LinkError):
        use(conversation.result())
        assert terms.secret is None, "a stranger was let in"


# Frames and messages.


def messages() -> Iterable[Message]:
    reference = Reference(1, b"0123456789abcdef", 3, "w1", 1)
    frames = (("a.py", "f", 3), ("b.py", "g", 4))
    earlier = ((True, "ValueError", "no", frames, b""), (False, "KeyError", "'k'", frames, b"x"))
    yield from (
        Request("torch:add", 1.5, b"1", 2, (reference,), 3, 4, True, True, 2),
        Request("a:b"),
    )
    yield from (Reply((reference, reference), 1, 2), Reply(), Cancel(), Accepted(), Dismiss())
    yield Failure("ValueError", "no", "trace", (reference,), frames, ("note",), earlier)
    yield from (Register(((1, b"2", 3),)), Registered(((1, b"2", 3, True), (4, b"5", 6, False))))
    yield from (Release(((1, b"2", 3), (4, b"5", 6))), Released(((1, b"2", 3),)))
    yield from (Received(True), Pinned(False), Leaving("why"), Crowded("why"))
    yield from (Drain(1), Drained(1, 2), ReleaseContext(1, 2), HoldContext(1))
    yield from (Gradients(1, 2, 3, 4, True, False, True, "w0", 5), CreditReturned(1, 2, 3, 4))
    yield from (PassFailed(1, 2), WhoIs("w1"), WhoIs(1), ThisIs(1, None))
    yield ThisIs("w1", Worker("w1", 1, 7, ("tcp://h:1",), "host", 9, "main"))


def metas() -> Iterable[bytes]:
    for message in messages():
        yield bytes([KINDS[type(message)]]) + encode_message(message)


@target(metas)
def message(data: bytes) -> None:
    with contextlib.suppress(BadFrame):
        read = decode_message(data[0] if data else 0, data[1:])
        use(read)
        again = decode_message(data[0], encode_message(read))
        assert repr(again) == repr(read)


def streams() -> Iterable[bytes]:
    for made in (
        Frame(Request("a:b"), 1, b"body", [b"x" * 65, b"", b"y"]),
        Frame(Reply(), 2, b"z" * 200),
        *(Frame(one, 4) for one in messages()),
    ):
        data = b"".join(bytes(part) for part in encode(made))
        yield b"\x07" + data + data
    for made in (Frame(Reply(), 3, bytes(70_000)), Frame(Reply(), 3, b"", [b"x", bytes(70_000)])):
        yield b"\xff" + b"".join(bytes(part) for part in encode(made)).rstrip(b"\0")


@target(streams)
def frame(data: bytes) -> None:
    """Read the frames in pieces whose length the first byte says: all ways give the same frames."""
    if not data:
        return
    zeros, piece = (ZEROS, READ_SIZE // 2) if data[0] > 0xF0 else (0, 1 + data[0])
    whole = read_frames(Wire(data[1:], zeros=zeros))
    assert read_frames(Wire(data[1:], piece, zeros)) == whole


def read_frames(wire: Wire) -> list[tuple[str, bytes, list[bytes]]]:
    reader = FrameReader(cast(socket.socket, wire), LIMITS)
    found = []
    with contextlib.suppress(LinkError):
        while True:
            read = reader.read()
            assert read is not None
            use(read)
            buffers = [bytes(buffer) for buffer in read.buffers]
            found.append((repr(read.message), bytes(read.body), buffers))
    return found


# A process group: an envelope with what stands behind it, then the messages that follow.


def envelopes() -> Iterable[bytes]:
    for made in (
        Frame(Request("a:b"), 1, b"body", [b"x" * 65, b"", b"y"]),
        Frame(Request("a:b"), 1, b"body", [b"y", b"z" * 3, bytes(40_000)]),
        Frame(Reply(), 2, bytes(40_000)),
    ):
        inline, payload = frames.pack(made)
        start = b"".join(map(bytes, inline))
        follows = b"".join(map(bytes, payload))
        yield enveloped(frames.EnvelopeKind.FRAME, start, len(follows)) + follows.rstrip(b"\0")
    buffers = [OnDevice(None, 8), b"x", OnDevice(None, 1 << 17)]
    ((announcement, _),) = frames.announce(buffers)
    yield enveloped(frames.EnvelopeKind.ON_DEVICE, announcement)
    yield enveloped(
        frames.EnvelopeKind.OPEN, encode_msgpack(link.LinkHello("w1", 1, 7, 0, "host", "main"))
    )


def enveloped(kind: frames.EnvelopeKind, inline: bytes, follows: int = 0) -> bytes:
    return frames.ENVELOPE.pack(kind, True, 1, len(inline), follows) + inline


@target(envelopes)
def group(data: bytes) -> None:
    if len(data) < frames.ENVELOPE.size:
        return
    with contextlib.suppress(BadFrame, LinkError):
        envelope = channel._parse(memoryview(data))
        rest = Wire(data[frames.ENVELOPE.size + len(envelope.inline) :], zeros=ZEROS)

        def receive(memory: Any) -> None:
            if rest.recv_into(memory) < len(memory):
                raise LinkError("the end")

        if envelope.kind is frames.EnvelopeKind.FRAME:
            use(frames.unpack(envelope.inline, envelope.follows > 0, receive, LIMITS))
        elif envelope.kind is frames.EnvelopeKind.ON_DEVICE:
            sizes = frames.announced(envelope.inline, LIMITS)
            made = {index: OnDevice(None, size) for index, size in sizes.items()}
            frames.put_in_place(Frame(Reply(), buffers=[b"", b"x", b""]), made)
        else:
            use(link.decode_hello(envelope.inline).worker)


# The store. A process that can write into it need be no member.


KINDS_IN_STORE = (RECORD, WORKER, CONFIRMATION, GATE)
UNSIGNED, SIGNED = (
    SignedStore(HashStore(), "fuzz", signer) for signer in (Unsigned(), SecretSigner(bytes(32)))
)


def records() -> Iterable[bytes]:
    worker = Worker("w1", 1, 7, ("tcp://h:1", "unix:@farcall-1"), "host", 9, "main")
    gate = GateOutcome("timed out", "w1", "late")
    for value in (
        Record(worker),
        Record(worker, "left"),
        worker,
        Confirmation("w1", bytes(32)),
        gate,
    ):
        for store in (UNSIGNED, SIGNED):
            yield store._sealed("another key", value)


@target(records)
def record(data: bytes) -> None:
    for kind in KINDS_IN_STORE:
        use(UNSIGNED._found("key", kind, data))
        assert SIGNED._found("key", kind, data).value is None, "it is not signed under this key"


SIGNED_DATA = b"what the store holds"
FILES = tempfile.TemporaryDirectory()  # of certificates, as long as this process


@functools.cache
def certified() -> tuple[Signer, bytes]:
    """Return a signer with a certificate, and its signature.

    The key is one of Ed25519: a second signature of the same data can't be made without it.
    """
    signer = Authority(Path(FILES.name), make_key=KEYS["Ed25519"]).signer("w1", "w1", binds=True)
    return signer, signer.sign(SIGNED_DATA)


def certified_signatures() -> Iterable[bytes]:
    signature = certified()[1]
    yield signature
    chain, proof = msgspec.msgpack.decode(signature)
    for other in ([*chain, *chain], [chain[0][:-1]], [b""], []):
        yield msgspec.msgpack.encode([other, proof])
    yield msgspec.msgpack.encode([chain, b""])


@target(certified_signatures)
def certificate(data: bytes) -> None:
    signer, signature = certified()
    objection = signer.objection(SIGNED_DATA, data, "w1")
    assert objection or data == signature, "it was never signed"
    use(objection)


# Values.

SERIALIZER = Serializer()
ONLY = Only(["operator:add"], [Worker])


def values() -> tuple[object, ...]:
    return (
        None,
        (1, -1, 1 << 40, 2.5, True, "text", b"bytes"),
        [[[()]], {"k": (1, "v"), 3: None}],
        {"a" * 300: b"b" * 300},
        (torch.arange(6.0).reshape(2, 3), torch.ones(2, requires_grad=True)),
        [torch.zeros(3, dtype=torch.bool), torch.arange(3).to(torch.bfloat16)],
        torch.arange(12).reshape(3, 4).t()[1:],
        torch.ones(20_000),
    )


def payloads(more: Iterable[object], *, strict: bool) -> Iterable[bytes]:
    for value in (*values(), *more):
        payload = SERIALIZER.dump(value, strict=strict)
        yield struct.pack("<B", len(payload.buffers)) + bytes(payload.body)


@target(lambda: payloads((), strict=False))
def plain(data: bytes) -> None:
    """Read with the compiled reader. The first byte says how many buffers come, too."""
    if SERIALIZER.plain is None or not data:
        return
    buffers = [bytearray(80_000) for _ in range(data[0] % 4)]
    value = SERIALIZER.plain.load(data[1:], buffers, (), None)
    use(value)
    clear(value)


MORE = (
    {(1, ("a", None)), frozenset({2}), 1.5},
    (slice(1, 2), range(3), ..., torch.float16, torch.device("cpu"), 1 << 100, 2j),
    (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.nn.Parameter(torch.ones(2))),
    (numpy.arange(6).reshape(2, 3), numpy.float32(1.5), operator.add, ValueError("no")),
    (Worker("w1", 1, 7), datetime(2026, 1, 2, 3, 4, 5), timedelta(1, 2, 3)),
)


@target(lambda: payloads(MORE, strict=True))
def strict(data: bytes) -> None:
    """Read with the reader of workers that have a policy. The first byte is that of `plain`."""
    if not data:
        return
    buffers = [bytearray(80_000) for _ in range(data[0] % 4)]
    with contextlib.suppress(SerializationError, Refused):
        value = SERIALIZER.load(data[1:], buffers, only=ONLY)
        use(value)
        clear(value)


def clear(value: object) -> None:
    """Write to the result, as its owner may."""
    if isinstance(value, torch.Tensor):
        value.detach().zero_()
    elif isinstance(value, list | tuple):
        for item in value:
            clear(item)


def failures() -> Iterable[bytes]:
    def fail() -> None:
        try:
            raise KeyError("k")
        except KeyError as error:
            raise ValueError("no", torch.ones(2)) from error

    try:
        fail()
    except ValueError as error:
        failure, payload = dump_failure(SERIALIZER, error, strict=True)
        yield encode_message(failure)
        assert payload is not None
    yield from (encode_message(one) for one in messages() if isinstance(one, Failure))


@target(failures)
def failure(data: bytes) -> None:
    """Load an exception that a peer describes to a worker that has a policy."""
    try:
        read = decode_message(Kind.FAILURE, data)
    except BadFrame:
        return
    assert isinstance(read, Failure)
    error = load_failure(SERIALIZER, read, b"", worker="w1", only=ONLY)
    use(error)
    str(error)
