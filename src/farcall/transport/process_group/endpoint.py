"""Frames over a process group: every rank has a way to every other one from the beginning.

Links are numbers on that way: a dialled one exists once the peer has answered `OPENED`. Frames of
a peer that closes arrive before its end: it says bye, and waits a little for the others to say
it, too. Process groups know no authentication: all members of the group are trusted.

A receiver without a reader stops receiving after `UNREAD_LIMIT` bytes, and so holds up the
senders.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time

from farcall.errors import BadFrame, LinkError
from farcall.ids import Worker
from farcall.log import get_logger
from farcall.plain import encode_msgpack
from farcall.transport.base import (
    OUTCOMES,
    Admit,
    Arrived,
    Event,
    Link,
    LinkLost,
    Means,
    NotSent,
)
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import admit_all
from farcall.transport.process_group.channel import Channel, Envelope
from farcall.transport.process_group.frames import EnvelopeKind, announced, put_in_place, unpack
from farcall.transport.process_group.group import DeviceChannels, RankGroup
from farcall.transport.process_group.link import (
    GroupLink,
    LinkHello,
    Opening,
    decode_hello,
)
from farcall.transport.waiter import MAX_WAIT, Waiter
from farcall.transport.watch import PollingWatch
from farcall.wire.frames import DEFAULT_LIMITS, Frame, Limits
from farcall.wire.messages import KINDS

logger = get_logger("farcall")

LINGER_SECONDS = 2.0  # what closing waits for peers that don't say bye
UNREAD_LIMIT = 4 << 20


class ProcessGroupEndpoint:
    """See `base.Endpoint`.

    Args:
        me: what to say of ourselves.
        group: our place in the group; closed with the endpoint.
        admit: asked about everyone who dials in.
        limits: what a peer may make us allocate.
        device_channels: for buffers on a device; closed with the endpoint. All ranks have them, or
            none.
    """

    def __init__(
        self,
        me: Identity,
        group: RankGroup,
        admit: Admit = admit_all,
        limits: Limits = DEFAULT_LIMITS,
        device_channels: DeviceChannels | None = None,
    ) -> None:
        self.me = me
        self.scheme = group.scheme
        self.means = Means(f"process_group ({group.scheme})")
        self._group = group
        self._device_channels = device_channels
        self._admit = admit
        self._limits = limits
        # With what each adds to `_unread`. SimpleQueue.put may be called from a finalizer.
        self._events: queue.SimpleQueue[tuple[Event | None, int]] = queue.SimpleQueue()
        self._gate = threading.Condition()  # guards `_unread` and `_held_up`
        self._unread = 0
        self._held_up = 0  # channels' readers that wait until a thread takes frames
        self._receiving = False
        self._lock = threading.Lock()  # guards what follows
        self._links: dict[tuple[int, bool, int], GroupLink] = {}
        self._dialled: dict[int, GroupLink] = {}
        self._openings: dict[int, Opening] = {}  # by number
        self._numbers = itertools.count()
        self._closed = False
        self._channels = {
            rank: Channel(
                group, rank, self._on_envelope, self._on_end, self._open_gate, device_channels
            )
            for rank in range(group.size)
            if rank != group.rank
        }
        for channel in self._channels.values():
            channel.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"{self.scheme}://{self._group.rank}",)

    @property
    def has_device_channels(self) -> bool:
        """Return whether frames may have buffers that are `OnDevice`."""
        return self._device_channels is not None

    # Dialling.

    def is_gone(self, worker: Worker, deadline: float) -> bool:
        return False  # a rank of a process group is not taken over

    def answers(self, worker: Worker, deadline: float) -> bool:
        return True  # there is no way beside that of the frames, which may be full of them

    def linked(self, worker: Worker) -> GroupLink | None:
        link = self._dialled.get(worker.incarnation)
        return link if link is not None and link.loss_cause is None else None

    def connect(self, worker: Worker, deadline: float) -> GroupLink:
        link = self._dialled.get(worker.incarnation)
        if link is not None and link.loss_cause is None:
            return link
        channel = self._channel_to(worker)
        with self._lock:
            link = self._dialled.get(worker.incarnation)
            if link is not None and link.loss_cause is None:
                return link
            if self._closed:
                raise LinkError("this worker has shut down")
            opening = self._opening(worker, channel)
        # A caller that gives up leaves it as it is: the link is there when it is wanted again.
        if not opening.done.wait(max(0.0, min(deadline - time.monotonic(), MAX_WAIT))):
            raise NotSent
        if opening.link is None:
            raise LinkError(f"can't reach worker {worker.name!r}: {opening.failure}")
        return opening.link

    def _channel_to(self, worker: Worker) -> Channel:
        for address in worker.addresses:
            scheme, _, rank = address.partition("://")
            if scheme == self.scheme and rank.isdecimal() and int(rank) in self._channels:
                return self._channels[int(rank)]
        raise LinkError(
            f"can't reach worker {worker.name!r}: its addresses, {worker.addresses}, have no rank "
            f"of our process group ({self.scheme}, {self._group.size} ranks)"
        )

    def _opening(self, worker: Worker, channel: Channel) -> Opening:
        """Return the attempt that is under way, or a new one. `_lock` held."""
        for opening in self._openings.values():
            if opening.incarnation == worker.incarnation:
                return opening
        if channel.ended is not None:
            raise LinkError(f"can't reach worker {worker.name!r}: {channel.ended}")
        opening = Opening(channel, worker.incarnation)
        number = next(self._numbers)
        self._openings[number] = opening
        try:
            channel.send(EnvelopeKind.OPEN, True, number, [self._hello(worker.incarnation)])
        except LinkError as error:
            del self._openings[number]
            raise LinkError(f"can't reach worker {worker.name!r}: {error}") from error
        return opening

    def _hello(self, expects: int) -> bytes:
        me = self.me
        names = me.name, me.id, me.incarnation
        return encode_msgpack(LinkHello(*names, expects, me.host, me.main, me.strict))

    def _watch(self, link: GroupLink, call_id: int, waiter: Waiter[Frame]) -> None:
        """Note, for a link, that a thread waits for the outcome of a call."""
        with self._lock:
            if link.loss_cause is not None:
                raise LinkError(link.loss_cause)
            link.waiters[call_id] = waiter
        if self._held_up:
            self._open_gate()

    # The work of the readers of the channels.

    def _on_envelope(self, channel: Channel, envelope: Envelope) -> None:
        # The flag says what the sender is; the key, what we are.
        key = (channel.rank, not envelope.by_dialler, envelope.link)
        if envelope.kind is EnvelopeKind.FRAME:
            self._on_frame(channel, key, envelope)
        elif envelope.kind is EnvelopeKind.ON_DEVICE:
            self._on_announcement(channel, envelope)
        elif envelope.kind is EnvelopeKind.OPEN:
            self._on_open(channel, envelope)
        elif envelope.kind in (EnvelopeKind.HOLD, EnvelopeKind.GO_ON):
            link = self._links.get(key)
            if link is not None:
                link.gate.set_open(envelope.kind is EnvelopeKind.GO_ON)
        elif envelope.kind is EnvelopeKind.END:
            link = self._links.get(key)
            if link is not None:
                self._fail(link, "the peer closed the connection", tell=False)
        else:
            self._on_answer(channel, envelope)

    def _on_open(self, channel: Channel, envelope: Envelope) -> None:
        hello = decode_hello(envelope.inline)
        reason = None
        if hello.expects not in (0, self.me.incarnation):
            reason = f"rank {self._group.rank} is another incarnation now"
        reason = reason or self._admit(hello.name, hello.incarnation, 0)
        with self._lock:
            if reason is None and self._closed:
                reason = "this worker has shut down"
            if reason is None:
                self._add(channel, envelope.link, False, hello.worker)
        if reason is None:
            channel.send(EnvelopeKind.OPENED, False, envelope.link, [self._hello(0)])
        else:
            channel.send(EnvelopeKind.REFUSED, False, envelope.link, [reason.encode()[:4096]])

    def _on_answer(self, channel: Channel, envelope: Envelope) -> None:
        hello = decode_hello(envelope.inline) if envelope.kind is EnvelopeKind.OPENED else None
        with self._lock:
            opening = self._openings.pop(envelope.link, None)
            if opening is None:
                return
            if hello is None:
                reason = bytes(envelope.inline).decode(errors="replace")
                opening.failure = f"it refused: {reason}"
            else:
                opening.link = self._add(channel, envelope.link, True, hello.worker)
                self._dialled[hello.incarnation] = opening.link
        opening.done.set()

    def _add(self, channel: Channel, number: int, dialled: bool, peer: Worker) -> GroupLink:
        """Return a new link. `_lock` held."""
        link = GroupLink(self.scheme, channel, number, dialled, peer, self._watch)
        self._links[channel.rank, dialled, number] = link
        return link

    def _on_announcement(self, channel: Channel, envelope: Envelope) -> None:
        sizes = announced(envelope.inline, self._limits)
        self._wait_at_gate(channel, sum(sizes.values()))
        buffers = channel.receive_on_device(list(sizes.values()))
        channel.came.update(zip(sizes, buffers, strict=True))

    def _on_frame(self, channel: Channel, key: tuple[int, bool, int], envelope: Envelope) -> None:
        on_device, channel.came = channel.came, {}
        size = len(envelope.inline) + envelope.follows
        self._wait_at_gate(channel, size)
        size += sum(buffer.size for buffer in on_device.values())
        try:
            frame = unpack(envelope.inline, envelope.follows > 0, channel.receive, self._limits)
            if on_device:
                put_in_place(frame, on_device)
        except BadFrame as error:
            link = self._links.get(key)
            if link is not None:
                self._fail(link, str(error))
            if envelope.follows:
                raise  # where the next frame begins is not known
            return
        with self._lock:
            link = self._links.get(key)
            if link is None:
                return
            waiter = None
            if KINDS[type(frame.message)] in OUTCOMES:
                waiter = link.waiters.pop(frame.call_id, None)
            if waiter is None:
                with self._gate:
                    self._unread += size
                self._events.put((Arrived(link, frame), size))
                return
        waiter.deliver(frame)

    def _on_end(self, channel: Channel, cause: str) -> None:
        with self._lock:
            links = [link for link in self._links.values() if link.channel is channel]
            failed = {n: one for n, one in self._openings.items() if one.channel is channel}
            for number, opening in failed.items():
                del self._openings[number]
                opening.failure = cause
        for opening in failed.values():
            opening.done.set()
        if not links and not self._closed:
            logger.debug("%s: no way to rank %d any more: %s", self.me.name, channel.rank, cause)
        for link in links:
            self._fail(link, cause, tell=False)

    # Holding up.

    def _wait_at_gate(self, channel: Channel, size: int) -> None:
        """Wait, before a frame is received, for a place for it, or a thread that waits for it."""
        if self._receiving or self._unread + size <= UNREAD_LIMIT:
            return
        with self._gate:
            self._held_up += 1
            try:
                while not self._may_pass(channel, size):
                    self._gate.wait()
            finally:
                self._held_up -= 1

    def _may_pass(self, channel: Channel, size: int) -> bool:
        if self._receiving or self._closed or channel.cut is not None:
            return True
        if self._unread + size <= UNREAD_LIMIT:
            return True
        # No lock: its holder may be about to open the gate.
        links = list(self._links.values())
        return any(link.waiters for link in links if link.channel is channel)

    def _open_gate(self) -> None:
        with self._gate:
            self._gate.notify_all()

    # Events.

    def next(self, timeout: float | None) -> Event | None:
        if self._events.empty():  # else no reader needs to be let in for this
            self._receiving = True  # before the look at `_held_up`: a reader sees one or the other
            if self._held_up:
                self._open_gate()
        try:
            return self._taken(self._events.get(timeout=timeout))
        except queue.Empty:
            return None
        finally:
            self._receiving = False

    def poll(self) -> Event | None:
        try:
            return self._taken(self._events.get_nowait())
        except queue.Empty:
            return None

    def _taken(self, taken: tuple[Event | None, int]) -> Event | None:
        event, size = taken
        if size:
            with self._gate:
                self._unread -= size
                if self._held_up:
                    self._gate.notify_all()
        return event

    def new_watch(self) -> PollingWatch:
        return PollingWatch()

    def wake(self) -> None:
        self._events.put((None, 0))

    # Ending.

    def links(self) -> list[Link]:
        with self._lock:
            return list[Link](self._links.values())

    def drop(self, peer: int, cause: str) -> None:
        with self._lock:
            links = [link for link in self._links.values() if link.peer.incarnation == peer]
        for link in links:
            self._fail(link, cause)

    def _fail(self, link: GroupLink, cause: str, *, tell: bool = True) -> None:
        with self._lock:
            if link.loss_cause is not None:
                return
            link.loss_cause = cause
            link.gate.set_open(True)
            waiters = link.take_waiters()
            del self._links[link.channel.rank, link.dialled, link.number]
            if self._dialled.get(link.peer.incarnation) is link:
                del self._dialled[link.peer.incarnation]
            if not self._closed:
                self._events.put((LinkLost(link, cause), 0))
        for waiter in waiters:
            waiter.fail(cause)
        link.channel.on_link_lost()
        if tell:
            with contextlib.suppress(LinkError):
                link.channel.send(EnvelopeKind.END, link.dialled, link.number)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links.values())
            openings = list(self._openings.values())
            self._openings.clear()
        self._events.put((None, 0))
        self._open_gate()
        for opening in openings:
            opening.failure = "this worker has shut down"
            opening.done.set()
        for link in links:
            self._fail(link, "this worker has shut down", tell=False)
        channels = [channel for channel in self._channels.values() if channel.is_used]
        for channel in channels:
            channel.say_bye()
        until = time.monotonic() + LINGER_SECONDS
        for channel in channels:
            channel.wait_for_end(until)
        self._group.close()
        until = time.monotonic() + LINGER_SECONDS
        if self._device_channels is not None:
            self._device_channels.close()
        if all(channel.wait_for_end(until, is_closed=True) for channel in self._channels.values()):
            self._group.free()

    def close_after_fork(self) -> None:
        self._closed = True
