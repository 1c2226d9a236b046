"""All that travels between two ranks of a process group: two threads, and waits for them.

A reader has receives under way for as long as the channel lives, so that the end of the peer is
noticed: a process group tells only those who wait for that very rank. A writer waits until its
messages are through. Small messages are given to the group by the sending thread, which does not
wait; a frame of more than one message goes by the writer, so that a sender that is interrupted
leaves nothing half sent.

Where there are device channels, a third thread waits for the end of the peer, or its alarm, while
the others may be waiting for a device channel, which notices no deaths.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from farcall.errors import BadFrame, LinkError
from farcall.threads import FarcallThread
from farcall.transport.base import NotSent
from farcall.transport.process_group.frames import (
    ALARM_TAG,
    ENVELOPE,
    ENVELOPE_TAG,
    MESSAGE_SIZE,
    PAYLOAD_TAG,
    EnvelopeKind,
    announce,
)
from farcall.transport.process_group.group import DeviceChannels, Operation, RankGroup
from farcall.transport.waiter import MAX_WAIT
from farcall.wire.messages import Buffer, OnDevice

WINDOW = 1 << 20  # bytes that may be under way before the next sender waits
RETRY_SECONDS = 0.1  # after the system gave no thread
DEPTH = 2  # messages that the peer can send before the first is looked at


class Envelope(msgspec.Struct, frozen=True):
    """The content of an envelope. `follows`: bytes that come under the other tag."""

    kind: EnvelopeKind
    by_dialler: bool
    link: int
    inline: memoryview
    follows: int


class _Job(msgspec.Struct, eq=False):
    """Messages to send, or that were given to the group already (`operations`).

    Buffers on a device go before them: pairs of an announcement and its buffers.
    """

    messages: Sequence[Buffer]
    size: int
    on_device: Sequence[tuple[Buffer, list[OnDevice]]] = ()
    operations: list[Operation] | None = None
    is_done: bool = False
    failure: str = ""


class Channel:
    """The way to one rank. Nothing is received before `start`.

    Args:
        group: our place in the group.
        rank: of the peer.
        on_envelope: called by the reader with each; before it returns it has to `receive` what
            follows. May raise BadFrame or LinkError, which is the end of the channel.
        on_end: called once by the reader, last of all, with the cause.
        on_cut: called when sending failed: the reader has to go on, to find the end.
        device_channels: for buffers on a device, if there are any.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        on_envelope: Callable[[Channel, Envelope], None],
        on_end: Callable[[Channel, str], None],
        on_cut: Callable[[], None],
        device_channels: DeviceChannels | None = None,
    ) -> None:
        self.rank = rank
        self.ended: str | None = None
        self.cut: str | None = None  # why nothing can be sent any more
        self.is_used = False  # whether there ever was anything to say
        self.came: dict[int, OnDevice] = {}  # for the reader: on a device, before their frame
        self._group = group
        self._on_envelope = on_envelope
        self._on_end = on_end
        self._on_cut = on_cut
        self._has_room = threading.Condition()  # guards what follows
        self._unsent = 0
        self._unposted = 0
        self._said_bye = False
        self._alarm: Operation | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Of jobs that failed: some may be under way, with their memory.
        self._unfinished: list[Operation] = []
        name = f"farcall {group.scheme} {group.rank}-{rank}"
        self._reader = FarcallThread(self._read, f"{name} in")
        self._writer = FarcallThread(self._write, f"{name} out")
        self._has_writer = False
        self._device_channels = device_channels
        self._watcher = FarcallThread(self._watch, f"{name} alarm")

    def start(self) -> None:
        if not self._group.notices_ends:
            with self._has_room:
                self._use()  # there will be a bye to say
        for thread in (
            self._reader,
            *((self._watcher,) if self._device_channels is not None else ()),
        ):
            refused = thread.try_start()
            if refused is not None:
                raise LinkError(f"no thread for the connection to rank {self.rank}: {refused}")

    # Sending.

    def send(
        self,
        kind: EnvelopeKind,
        by_dialler: bool,
        link: int,
        inline: Sequence[Buffer] = (),
        payload: Sequence[Buffer] = (),
        deadline: float | None = None,
        loss_cause: Callable[[], str | None] = lambda: None,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        """Send an envelope and what follows it.

        Args:
            buffers: those of them that are on a device are announced and sent before.
            deadline: None: don't wait at all.
            loss_cause: why the link is lost, if it is; see `on_link_lost`.

        Raises:
            NotSent: there was no room for it until the deadline.
            TimeoutError: the deadline passed later; the payload's memory must stay as it is.
            LinkError: the peer can't be reached any more.
        """
        follows = sum(map(len, payload))
        length = sum(map(len, inline))
        envelope = ENVELOPE.pack(kind, by_dialler, link, length, follows)
        on_device = []
        for announcement, some in announce(buffers):
            head = ENVELOPE.pack(EnvelopeKind.ON_DEVICE, by_dialler, link, len(announcement), 0)
            on_device.append((bytearray(head + announcement), some))
        size = length + follows + sum(one.size for _, some in on_device for one in some)
        job = _Job([bytearray().join((envelope, *inline)), *payload], size, on_device)
        with self._has_room:
            if deadline is not None and not self._wait_until(
                lambda: self._unsent <= WINDOW, deadline, loss_cause
            ):
                raise NotSent
            cause = (
                self.cut or loss_cause() or ("the connection is closed" if self._said_bye else None)
            )
            if cause is not None:
                raise LinkError(cause)
            if deadline is not None:
                self._wait_for_writer(deadline)
            self._add(job)
            if (payload or on_device) and deadline is not None:
                if not self._wait_until(lambda: job.is_done, deadline, loss_cause):
                    raise TimeoutError
                if job.failure:
                    raise LinkError(job.failure)

    def _wait_until(
        self, is_so: Callable[[], bool], deadline: float, loss_cause: Callable[[], str | None]
    ) -> bool:
        """Return whether it was so before the deadline. `_has_room` held."""
        while not is_so():
            cause = self.cut or loss_cause()
            if cause is not None:
                raise LinkError(cause)
            left = MAX_WAIT if deadline == math.inf else deadline - time.monotonic()
            if left <= 0:
                return False
            self._has_room.wait(min(left, MAX_WAIT))
        return True

    def _wait_for_writer(self, deadline: float) -> None:
        """Raises NotSent if the system gives no thread that writes. `_has_room` held."""
        self._use()
        while not self._has_writer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotSent("the system gives no thread to send it")
            self._has_room.wait(min(left, RETRY_SECONDS))
            self._use()

    def on_link_lost(self) -> None:
        """Have those who send on it look again."""
        with self._has_room:
            self._has_room.notify_all()

    def _add(self, job: _Job) -> None:
        """Have a job done. `_has_room` held."""
        self._use()
        self._unsent += job.size
        if len(job.messages) == 1 and not job.on_device and not self._unposted:
            try:
                job.operations = [self._post(job.messages[0], ENVELOPE_TAG)]
            except LinkError as error:
                self._unsent -= job.size
                self.cut = str(error)
                self._on_cut()
                raise
        else:
            self._unposted += 1  # those behind it must not overtake it
        self._jobs.put(job)

    def _post(self, message: Buffer, tag: int) -> Operation:
        return self._group.send(self.rank, tag, message)

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            except LinkError as error:
                self._fail(job, str(error))
            else:
                with self._has_room:
                    self._end(job)
            del job  # what it holds is not kept until there is another

    def _do(self, job: _Job) -> None:
        operations = job.operations or []
        try:
            # If it was the device channels that broke, bye, which has no size, still gets through.
            if self.cut is not None and job.size:
                raise LinkError(self.cut)
            if not operations:
                operations.extend(self._post_all(job))
                with self._has_room:
                    self._unposted -= 1
            for operation in operations:
                operation.wait()
        except LinkError:
            self._unfinished += operations
            raise

    def _post_all(self, job: _Job) -> Iterator[Operation]:
        for announcement, buffers in job.on_device:
            if self._device_channels is None:
                raise LinkError("this process group has no device channels for buffers on a device")
            yield self._post(announcement, ENVELOPE_TAG)
            for buffer in buffers:
                yield self._device_channels.send(self.rank, buffer)
        first, *rest = job.messages
        yield self._post(first, ENVELOPE_TAG)
        for message in rest:
            yield self._post(message, PAYLOAD_TAG)

    def _fail(self, job: _Job, cause: str) -> None:
        with self._has_room:
            self.cut = self.cut or cause
            job.failure = cause
            self._end(job)
        self._abandon_device_channels()
        self._on_cut()

    def _end(self, job: _Job) -> None:
        """`_has_room` held."""
        job.is_done = True
        self._unsent -= job.size
        self._has_room.notify_all()

    def say_bye(self) -> None:
        """Say that nothing is sent after this. If nothing was before, the end speaks for itself."""
        with self._has_room:
            if self._said_bye or not self.is_used:
                return
            self._said_bye = True
            self._use()
            bye = bytearray(ENVELOPE.pack(EnvelopeKind.BYE, False, 0, 0, 0))
            self._unposted += 1
            self._jobs.put(_Job([bye], 0))
            self._jobs.put(None)

    # Receiving.

    def receive(self, memory: Buffer) -> None:
        """Receive the next message that follows, for `on_envelope`.

        Raises:
            LinkError: the channel has ended.
        """
        self._group.receive(self.rank, PAYLOAD_TAG, memory).wait()

    def receive_on_device(self, sizes: Sequence[int]) -> list[OnDevice]:
        """Receive the announced buffers, for `on_envelope`.

        Args:
            sizes: in bytes.

        Raises:
            BadFrame: there are no device channels.
            LinkError: the channel has ended.
        """
        if self._device_channels is None:
            raise BadFrame(
                "a buffer on a device was sent to a worker that has no device channels for it"
            )
        coming = [self._device_channels.receive(self.rank, size) for size in sizes]
        for _, operation in coming:
            operation.wait()
        return [buffer for buffer, _ in coming]

    def _watch(self) -> None:
        with contextlib.suppress(LinkError):
            self._group.receive(self.rank, ALARM_TAG, bytearray(1)).wait()
        if self._device_channels is not None:
            self._device_channels.abandon(self.rank)
        self.say_bye()

    def _abandon_device_channels(self) -> None:
        """Abandon the device channels, which failed; a living peer then stops waiting, says bye."""
        if self._device_channels is None:
            return
        self._device_channels.abandon(self.rank)
        with self._has_room:
            if self._alarm is None:
                with contextlib.suppress(LinkError):
                    self._alarm = self._post(b"!", ALARM_TAG)  # no thread waits for this

    def _read(self) -> None:
        cause = "the peer closed the connection"
        try:
            memories = [memoryview(bytearray(MESSAGE_SIZE)) for _ in range(DEPTH)]
            coming = deque((self._receive_into(memory), memory) for memory in memories)
            while True:
                operation, memory = coming.popleft()
                operation.wait()
                envelope = _parse(memory)
                if envelope.kind is EnvelopeKind.BYE:
                    break
                with self._has_room:
                    self._use()
                self._on_envelope(self, envelope)
                coming.append((self._receive_into(memory), memory))
        except (BadFrame, LinkError) as error:
            cause = str(error)
            self._abandon_device_channels()
        self.say_bye()
        self.ended = cause
        self._on_end(self, cause)

    def _use(self) -> None:
        """Start the writer, since there are words to send. The caller holds `_has_room`."""
        self.is_used = True
        if not self._has_writer:
            self._has_writer = self._writer.try_start() is None

    def _receive_into(self, memory: memoryview) -> Operation:
        return self._group.receive(self.rank, ENVELOPE_TAG, memory)

    # Ending.

    def wait_for_end(self, deadline: float, *, is_closed: bool = False) -> bool:
        """Wait until all that was sent is through and the peer said bye; return whether in time.

        Args:
            is_closed: the group is, so nothing is waited for any more.
        """
        threads = (self._writer, self._reader, *((self._watcher,) if is_closed else ()))
        started = [one for one in threads if one.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)


def _parse(memory: memoryview) -> Envelope:
    kind, by_dialler, link, length, follows = ENVELOPE.unpack_from(memory)
    if kind not in EnvelopeKind.__members__.values():
        raise BadFrame(f"a message of unknown kind {kind} came from the process group")
    if length > len(memory) - ENVELOPE.size:
        raise BadFrame(f"a message claims {length} bytes, more than any has")
    inline = memory[ENVELOPE.size : ENVELOPE.size + length]
    return Envelope(EnvelopeKind(kind), bool(by_dialler), link, inline, follows)
