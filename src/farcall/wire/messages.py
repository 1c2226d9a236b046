"""The messages that workers exchange, and their bytes: msgpack, positional, each of its kind."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

import msgspec

from farcall.errors import BadFrame
from farcall.ids import RefNumber, Worker
from farcall.plain import encode_msgpack

Buffer = bytes | bytearray | memoryview


class OnDevice(bytearray):
    """A buffer whose bytes are in the memory of a device; to code that doesn't look, an empty one.

    Only for transports that carry such buffers.

    Attributes:
        memory: what stands for the bytes: opaque here.
        size: in bytes.
        ready: when the bytes are there, for a device that works asynchronously: opaque here. None:
            they are.
    """

    __slots__ = ("memory", "ready", "size")

    def __init__(self, memory: object, size: int, ready: object = None) -> None:
        super().__init__()
        self.memory = memory
        self.size = size
        self.ready = ready


class Kind(IntEnum):
    """The kinds of frames. The value is on the wire: append, never renumber."""

    REQUEST = 1
    REPLY = 2
    FAILURE = 3
    CANCEL = 4
    ACCEPTED = 5
    REGISTER = 6
    REGISTERED = 7
    RELEASE = 8
    RELEASED = 9
    RECEIVED = 10
    LEAVING = 11
    DRAIN = 12
    DRAINED = 13
    DISMISS = 14
    PINNED = 15
    RELEASE_CONTEXT = 16
    HOLD_CONTEXT = 17
    GRADIENTS = 18
    CREDIT_RETURNED = 19
    PASS_FAILED = 20
    CROWDED = 21
    WHO_IS = 22
    THIS_IS = 23


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of the messages: positional on the wire, new fields go last and have defaults.

    Not changed after construction.
    """


# Of a reference that a worker holds: minted_by, number, sequence.
Entry = tuple[int, RefNumber, int]

# Of a call that an object runs: minted_by and number of the object's reference, and the turn.
Turn = tuple[int, RefNumber, int]


class Reference(Message):
    """A reference inside a message: the id of a value, and its owner."""

    minted_by: int
    number: RefNumber
    owner: int
    owner_name: str
    owner_id: int


class Extras(Message):
    """The fields that few requests have.

    `concurrency` is how many calls of methods of the value that it makes may run at once, 0 for any
    number. `held` are the turns of those calls of methods that the request comes from. `trace` is
    what the propagators of OpenTelemetry tell the callee of the caller's span, if calls are traced.
    """

    concurrency: int = 0
    held: tuple[Turn, ...] = ()
    trace: dict[str, str] = {}


class Request(Message):
    """Run a function. The body is pickled (args, kwargs), or (function, args, kwargs).

    `function` is "module:qualname", or "" when the function itself is in the body. `timeout` is in
    seconds from sending, 0 for none. `creates` is the number of the reference that shall hold the
    result (b"": the caller wants the result itself), `sequence` the caller's registration of it.
    `context` is the autograd context of the caller (0: none), `sent` the sender's number for the
    tensors requiring grad in the body (0: it recorded none). With `no_grad` the function runs under
    `torch.no_grad`, as the call was made. With `on_reference` the function gets the value of the
    first reference first; that is not in the body, which numbers the others from 0. `depth` is 1
    for a call that no remote function makes, and one more than the depth of the call that makes it
    otherwise. `extras` is nothing for nearly every request.
    """

    function: str
    timeout: float = 0.0
    creates: RefNumber = b""
    sequence: int = 0
    references: tuple[Reference, ...] = ()
    context: int = 0
    sent: int = 0
    no_grad: bool = False
    on_reference: bool = False
    depth: int = 1
    extras: Extras | None = None


class Reply(Message):
    """The call's value; pickled in the body. `context` and `sent` as in a request."""

    references: tuple[Reference, ...] = ()
    context: int = 0
    sent: int = 0


CANCELLED = "farcall.errors.Cancelled"  # the `Failure.type_name` of a call that was cancelled


class Failure(Message):
    """The call raised. The body is the pickled exception, or empty when it can't be pickled."""

    type_name: str
    message: str
    traceback: str
    references: tuple[Reference, ...] = ()
    frames: tuple[tuple[str, str, int], ...] = ()  # file, function, line; outermost first
    notes: tuple[str, ...] = ()
    # What Python shows above the exception, the nearest first: whether it is the cause (else the
    # context) of the one before, type name, message, frames, and the pickled exception, or nothing.
    earlier: tuple[tuple[bool, str, str, tuple[tuple[str, str, int], ...], bytes], ...] = ()


class Cancel(Message):
    """The caller gave up on the call. It is answered like any other outcome.

    With `by_user` that was asked for, and not for want of time: what the call waits for and has
    called ends, too. With `waits` the caller takes the answer nevertheless.
    """

    by_user: bool = False
    waits: bool = False


class Accepted(Message):
    """The owner has made the reference that the request creates."""

    references: ClassVar[tuple[Reference, ...]] = ()  # as in other answers


class Register(Message):
    """The sender holds these references."""

    entries: tuple[Entry, ...]


class Registered(Message):
    """The owner's answer to Register: (minted_by, number, sequence, known) each."""

    entries: tuple[tuple[int, RefNumber, int, bool], ...]


class Release(Message):
    """The sender no longer holds these references."""

    entries: tuple[Entry, ...]


class Released(Message):
    """The owner's answer to Release."""

    entries: tuple[Entry, ...]


class Received(Message):
    """The references in this call's request (or reply) are registered: unpin them."""

    of_reply: bool


class Pinned(Message):
    """The references in this call's request (or reply) are still pinned: have they arrived?"""

    of_reply: bool


class Leaving(Message):
    """The sender leaves on purpose; the end of its links is not a crash."""

    reason: str = "shut down"


class Drain(Message):
    """Asked of every worker by the leader of a graceful shutdown: tell me when you are idle."""

    round: int


class Drained(Message):
    """Answer to Drain: idle since activity `epoch`, and ready to leave."""

    round: int
    epoch: int


class Dismiss(Message):
    """All workers are idle and ready: everyone may go."""


class ReleaseContext(Message):
    """An autograd context has ended: forget it.

    All contexts of its creator with ids below `low_watermark` have ended, too.
    """

    context: int
    low_watermark: int


class HoldContext(Message):
    """To the creator of an autograd context: tell the sender of its end, since its giver died."""

    context: int


class Gradients(Message):
    """Of a backward pass: the gradients of tensors that the receiver sent. The body is pickled:
    index -> gradient, or None for one that is undefined.

    `context` and `number` are those of the message with the tensors, `backward` is the pass.
    `credit` stands for 2**-credit of the pass, which goes to the receiver. `retain_graph`,
    `create_graph` and `fast` are the options that the worker named `root` was given. `sent` is the
    sender's number for the gradients themselves, as in a request (0: they have no graph). `trace`
    is that of the root, as in `Extras`.
    """

    context: int
    backward: int
    number: int
    credit: int
    retain_graph: bool
    create_graph: bool
    fast: bool
    root: str
    sent: int = 0
    trace: dict[str, str] = {}


class CreditReturned(Message):
    """To the root of a backward pass: the sender gives this credit back.

    `missing` is how many messages of the sender wait for a gradient, in fast mode.
    """

    context: int
    backward: int
    credit: int
    missing: int


class PassFailed(Message):
    """To the root of a backward pass: it failed at the sender, which can be asked for the cause."""

    context: int
    backward: int


class Crowded(Message):
    """The sender has calls of the receiver, and no more threads for calls. For error messages."""

    why: str


class WhoIs(Message):
    """To a member: where is the worker of this name or id? Asked if the store does not say so."""

    key: str | int


class ThisIs(Message):
    """The answer to WHO_IS: the worker as it describes itself, or None if the sender knows none."""

    key: str | int
    worker: Worker | None


MESSAGES: dict[Kind, type[Message]] = {
    Kind.REQUEST: Request,
    Kind.REPLY: Reply,
    Kind.FAILURE: Failure,
    Kind.CANCEL: Cancel,
    Kind.ACCEPTED: Accepted,
    Kind.REGISTER: Register,
    Kind.REGISTERED: Registered,
    Kind.RELEASE: Release,
    Kind.RELEASED: Released,
    Kind.RECEIVED: Received,
    Kind.LEAVING: Leaving,
    Kind.DRAIN: Drain,
    Kind.DRAINED: Drained,
    Kind.DISMISS: Dismiss,
    Kind.PINNED: Pinned,
    Kind.RELEASE_CONTEXT: ReleaseContext,
    Kind.HOLD_CONTEXT: HoldContext,
    Kind.GRADIENTS: Gradients,
    Kind.CREDIT_RETURNED: CreditReturned,
    Kind.PASS_FAILED: PassFailed,
    Kind.CROWDED: Crowded,
    Kind.WHO_IS: WhoIs,
    Kind.THIS_IS: ThisIs,
}
KINDS: dict[type[Message], Kind] = {message: kind for kind, message in MESSAGES.items()}

encode_message = encode_msgpack
_decoders: dict[int, msgspec.msgpack.Decoder[Message]] = {
    int(kind): msgspec.msgpack.Decoder(message) for kind, message in MESSAGES.items()
}


def decode_message(kind: int, meta: Buffer) -> Message:
    """Return the message of a frame of that kind.

    Raises:
        BadFrame: the metadata is not such a message, or there is no such kind.
    """
    try:
        return _decoders[kind].decode(meta)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        name = Kind(kind).name if kind in _decoders else kind
        raise BadFrame(f"broken {name} message: {error}") from error
