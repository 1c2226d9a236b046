"""Links over a process group: how they are opened, and what they are for those who use them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec

from farcall.errors import BadFrame, LinkError
from farcall.ids import Worker
from farcall.transport.dispatched_link import DispatchedLink, Gate
from farcall.transport.process_group.channel import Channel
from farcall.transport.process_group.frames import EnvelopeKind, pack
from farcall.transport.waiter import Waiter
from farcall.wire.frames import Frame


class LinkHello(msgspec.Struct, frozen=True, array_like=True):
    """The side that opens a link, or answers. `expects`: the incarnation that should answer."""

    name: str
    id: int
    incarnation: int
    expects: int
    host: str
    main: str
    strict: bool = False

    @property
    def worker(self) -> Worker:
        return Worker(
            self.name,
            self.id,
            self.incarnation,
            host=self.host,
            main=self.main,
            strict=self.strict,
        )


_decode = msgspec.msgpack.Decoder(LinkHello).decode


def decode_hello(data: memoryview) -> LinkHello:
    """Raises BadFrame: it is none."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(f"what opens a link on the process group is no hello: {error}") from error


class GroupLink(DispatchedLink):
    """See `base.Link`.

    Args:
        number: of the link, among those that the same side has dialled on the channel.
        watch: has a waiter get the answer with an id that comes by a link.
    """

    def __init__(
        self,
        scheme: str,
        channel: Channel,
        number: int,
        dialled: bool,
        peer: Worker,
        watch: Callable[[GroupLink, int, Waiter[Frame]], None],
    ) -> None:
        super().__init__()
        self.peer = peer
        self.description = f"{scheme} {'to' if dialled else 'from'} rank {channel.rank}"
        self.loss_cause: str | None = None
        self.channel = channel
        self.number = number
        self.dialled = dialled
        self.gate = Gate()  # of the senders
        self._watch = watch

    def set_reading(self, is_on: bool) -> None:
        # The peer is told. All its links share the way, so nothing else could be left unread.
        if self.loss_cause is None:
            with contextlib.suppress(LinkError):
                kind = EnvelopeKind.GO_ON if is_on else EnvelopeKind.HOLD
                self.channel.send(kind, self.dialled, self.number)

    def send(self, frame: Frame, deadline: float) -> None:
        self.gate.pass_by(deadline)
        if self.loss_cause is not None:
            raise LinkError(self.loss_cause)
        inline, payload = pack(frame)
        self.channel.send(
            EnvelopeKind.FRAME,
            self.dialled,
            self.number,
            inline,
            payload,
            deadline,
            lambda: self.loss_cause,
            frame.buffers,
        )

    def expect(self, call_id: int, waiter: Waiter[Frame]) -> None:
        self._watch(self, call_id, waiter)


class Opening:
    """A link that was asked for; over when `done` is set."""

    def __init__(self, channel: Channel, incarnation: int) -> None:
        self.channel = channel
        self.incarnation = incarnation
        self.done = threading.Event()
        self.link: GroupLink | None = None
        self.failure = ""
