"""Buffers on a device over a process group: announced, sent by channels, put into their frames.

These tests carry CPU tensors, by queues of one process, or by the channels of nccl over a
stand-in of torch's part: nccl itself needs GPUs (see tests/process/test_nccl_of_processes.py).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import fake_nccl
import pytest
import torch
from stations import PATIENCE, Station, Threads, echo, request, soon

from farcall.errors import BadFrame, LinkError, SerializationError
from farcall.ids import Worker, new_incarnation
from farcall.serde import Serializer, tensors
from farcall.testing.cluster import connected
from farcall.transport.base import Link
from farcall.transport.connect.handshake import Identity
from farcall.transport.process_group.endpoint import ProcessGroupEndpoint
from farcall.transport.process_group.frames import announce, announced, put_in_place
from farcall.transport.process_group.group import DeviceChannels
from farcall.wire.frames import DEFAULT_LIMITS, Frame, Limits
from farcall.wire.messages import OnDevice


class Item:
    """A tensor on its way."""

    def __init__(self, tensor: object) -> None:
        self.tensor = tensor
        self.has_arrived = False


class Waiting:
    """See `group.Operation`."""

    def __init__(self, channels: QueueChannels, other: int, is_over: Callable[[], bool]) -> None:
        self._channels = channels
        self._other = other
        self._is_over = is_over

    def wait(self) -> None:
        with self._channels.changed:
            while not self._is_over():
                self._channels.check(self._other)
                self._channels.is_waiting.set()
                assert self._channels.changed.wait(PATIENCE)


def fail() -> bool:
    raise LinkError("the device has failed")


class QueueChannels:
    """See `group.DeviceChannels`: one rank's.

    All ranks share `sent`, by sender and receiver, and `changed`.
    """

    def __init__(
        self, rank: int, changed: threading.Condition, sent: dict[tuple[int, int], deque[Item]]
    ) -> None:
        self.rank = rank
        self.changed = changed
        self.abandoned: set[int] = set()
        self.fails = ""  # sending does: "at once", or "on the way"
        self.is_stalled = False  # nothing arrives
        self.is_closed = False
        self.is_waiting = threading.Event()
        self._sent = sent

    def check(self, other: int) -> None:
        if other in self.abandoned:
            raise LinkError("the channel was abandoned")

    def send(self, to: int, buffer: OnDevice) -> Waiting:
        self.check(to)
        if self.fails == "on the way":
            return Waiting(self, to, fail)
        if self.fails:
            fail()
        item = Item(buffer.memory)
        with self.changed:
            self._sent[self.rank, to].append(item)
            self.changed.notify_all()
        return Waiting(self, to, lambda: item.has_arrived)

    def receive(self, source: int, size: int) -> tuple[OnDevice, Waiting]:
        self.check(source)
        buffer = OnDevice(None, size)

        def take() -> bool:
            queue = self._sent[source, self.rank]
            if self.is_stalled or not queue:
                return False
            item = queue.popleft()
            assert isinstance(item.tensor, torch.Tensor)
            assert item.tensor.nbytes == size
            buffer.memory = item.tensor.clone()
            item.has_arrived = True
            self.changed.notify_all()
            return True

        return buffer, Waiting(self, source, take)

    def abandon(self, rank: int) -> None:
        with self.changed:
            self.abandoned.add(rank)
            self.changed.notify_all()

    def close(self) -> None:
        self.is_closed = True


class Pair:
    """Two stations of a process group."""

    def __init__(self, channels: Sequence[DeviceChannels | None]) -> None:
        self.stations = []
        for rank, group in enumerate(connected(2)):
            me = Identity(f"w{rank}", rank, new_incarnation())
            endpoint = ProcessGroupEndpoint(me, group, device_channels=channels[rank])
            worker = Worker(me.name, rank, me.incarnation, endpoint.addresses)
            self.stations.append(Station(worker, endpoint))
        self.near, self.far = self.stations

    def close(self) -> None:
        for station in self.stations:
            station.close()


class QueuePair(Pair):
    """A pair whose channels do as they are told.

    Attributes:
        channels: of each.
    """

    def __init__(self, *, with_channels: tuple[bool, bool] = (True, True)) -> None:
        changed = threading.Condition()
        sent: dict[tuple[int, int], deque[Item]] = defaultdict(deque)
        self.channels = [QueueChannels(rank, changed, sent) for rank in range(2)]
        self._used = [
            one for one, is_used in zip(self.channels, with_channels, strict=True) if is_used
        ]
        super().__init__([one if one in self._used else None for one in self.channels])

    def close(self) -> None:
        super().close()
        assert all(channels.is_closed for channels in self._used)


@pytest.fixture
def pair() -> Iterator[QueuePair]:
    made = QueuePair()
    yield made
    made.close()


@pytest.fixture(params=["queues", "nccl"])
def any_pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "queues":
        made: Pair = QueuePair()
    else:
        fake_nccl.install(monkeypatch)
        made = Pair(fake_nccl.channels(2))
    yield made
    made.close()


def on_device(tensor: torch.Tensor) -> OnDevice:
    return OnDevice(tensor, tensor.nbytes)


def numbers(frame: Frame) -> list[list[int]]:
    """Return the numbers in the buffers, wherever these are."""
    return [
        one.memory.tolist() if isinstance(one, OnDevice) else list(one)  # type: ignore[attr-defined]
        for one in frame.buffers
    ]


def test_buffers_of_both_kinds_arrive_in_their_places_and_go_back(any_pair: Pair) -> None:
    any_pair.near.read()
    any_pair.far.read(echo)
    link = any_pair.near.connect(any_pair.far)
    small, large = torch.arange(5).byte(), torch.arange(200_000).byte()
    for number in range(1, 20):
        buffers = [b"a", on_device(small + number), b"", b"x" * 70_000 * (number % 2)]
        buffers += [on_device(large), on_device(small)]
        answer = link.exchange(request(number, b"body", buffers), soon())
        assert answer.body == b"body"
        where = [isinstance(one, OnDevice) for one in answer.buffers]
        assert where == [False, True, False, False, True, True]
        expected = [[97], (small + number).tolist(), [], list(buffers[3])]
        assert numbers(answer) == [*expected, large.tolist(), small.tolist()]


def test_more_buffers_than_one_announcement_holds(any_pair: Pair) -> None:
    any_pair.near.read()
    any_pair.far.read(echo)
    tensors_ = [torch.tensor([number % 256], dtype=torch.uint8) for number in range(5000)]
    frame = request(1, b"", [on_device(tensor) for tensor in tensors_])
    answer = any_pair.near.connect(any_pair.far).exchange(frame, soon())
    assert numbers(answer) == [[number % 256] for number in range(5000)]


def test_frames_of_several_threads_keep_their_buffers(any_pair: Pair, threads: Threads) -> None:
    any_pair.near.read()
    any_pair.far.read(echo)
    link = any_pair.near.connect(any_pair.far)

    def call(caller: int) -> None:
        for number in range(40):
            tensor = torch.full((caller * 100,), number, dtype=torch.uint8)
            buffers = [on_device(tensor)] if number % 3 else [bytes(tensor.tolist())]
            answer = link.exchange(request(caller << 32 | number, b"", buffers), soon())
            assert numbers(answer) == [tensor.tolist()]

    for caller in range(1, 7):
        threads.start(call, caller)
    threads.join()


@pytest.mark.parametrize("when", ["at once", "on the way"])
def test_sender_whose_channel_fails_loses_the_link_and_so_does_the_receiver(
    pair: QueuePair, when: str
) -> None:
    pair.near.read()
    pair.far.read()
    link = pair.near.connect(pair.far)
    link.send(request(1), soon())
    assert pair.far.arrived().frame.call_id == 1
    pair.channels[0].fails = when
    with pytest.raises(LinkError, match="the device has failed"):
        link.send(request(2, b"", [on_device(torch.ones(3))]), soon())
    assert pair.far.next_loss().link.peer.name == "w0"
    assert pair.near.next_loss()
    with pytest.raises(LinkError):
        link.send(request(3), soon())


def send_into_a_stalled_channel(pair: QueuePair, threads: Threads) -> Link:
    """Send in a thread, which expects that it fails."""
    pair.near.read()
    pair.far.read()
    link = pair.near.connect(pair.far)
    pair.channels[1].is_stalled = True

    def send() -> None:
        with pytest.raises(LinkError):
            link.send(request(1, b"", [on_device(torch.ones(3))]), soon())

    threads.start(send)
    return link


def test_frames_behind_one_whose_channel_fails_do_not_arrive_in_its_place(
    pair: QueuePair, threads: Threads
) -> None:
    link = send_into_a_stalled_channel(pair, threads)
    assert pair.channels[0].is_waiting.wait(PATIENCE)  # all of it is posted
    for number in range(2, 6):
        link.send(request(number), soon())
    pair.channels[0].abandon(1)  # as a failure of nccl is noticed
    assert "abandoned" in pair.far.next_loss().cause
    assert pair.near.next_loss()
    assert pair.far.events.empty()
    threads.join()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_thread_that_waits_for_a_channel_notices_that_the_peer_has_gone(
    pair: QueuePair, threads: Threads, gone: int
) -> None:
    send_into_a_stalled_channel(pair, threads)
    assert pair.channels[1 - gone].is_waiting.wait(PATIENCE)
    pair.stations[gone].close()
    cause = pair.stations[1 - gone].next_loss().cause
    assert gone == 1 or "abandoned" in cause
    threads.join()


def test_worker_without_device_channels_refuses_and_both_sides_hear_of_it() -> None:
    pair = QueuePair(with_channels=(True, False))
    pair.near.read()
    pair.far.read()
    link = pair.near.connect(pair.far)
    with pytest.raises(LinkError):
        link.send(request(1, b"", [on_device(torch.ones(3))]), soon())
    assert "no device channels" in pair.far.next_loss().cause
    assert pair.near.next_loss()
    pair.close()


def test_worker_without_device_channels_sends_nothing_that_is_on_a_device() -> None:
    pair = QueuePair(with_channels=(False, True))
    pair.near.read()
    pair.far.read()
    link = pair.near.connect(pair.far)
    with pytest.raises(LinkError, match="no device channels"):
        link.send(request(1, b"", [on_device(torch.ones(3))]), soon())
    pair.close()


def test_announcements_that_make_no_sense_are_refused() -> None:
    ((inline, _),) = announce([b"", OnDevice(None, 1000), b"x", OnDevice(None, 5)])
    assert announced(memoryview(inline), DEFAULT_LIMITS) == {1: 1000, 3: 5}
    with pytest.raises(BadFrame, match="limit is 999"):
        announced(memoryview(inline), Limits(buffer=999))
    with pytest.raises(BadFrame, match="announce no buffers"):
        announced(memoryview(inline[:-1]), DEFAULT_LIMITS)
    for index in (0, 2):
        with pytest.raises(BadFrame, match="no place"):
            put_in_place(request(1, b"", [b"x", b""]), {index: OnDevice(None, 1)})


class Elsewhere:
    """Stands for a tensor on a device whose map is direct."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_tensors_travel_from_device_to_device(any_pair: Pair) -> None:
    any_pair.near.read()
    any_pair.far.read(echo)
    link = any_pair.near.connect(any_pair.far)
    reducers = {Elsewhere: lambda one: tensors._reduce_direct(one.tensor, "cpu")}
    sender = Serializer(reducers=reducers)
    base = torch.randn(20, 30)
    sent = [
        base,
        base.t(),
        base[3:9, ::2],
        base[:1].expand(50, 30),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.tensor(True),
        torch.randn(100_000).to(torch.bfloat16),
    ]
    host = torch.randn(9000)
    payload = sender.dump([host, *map(Elsewhere, sent)])
    assert len(payload.body) < 3000, "buffers on the device are not in the pickle"
    answer = link.exchange(request(1, payload.body, payload.buffers), soon())
    receiver = Serializer()
    got_host, *got = receiver.load(answer.body, answer.buffers)
    assert torch.equal(got_host, host)
    for before, after in zip(sent, got, strict=True):
        assert torch.equal(before, after)
        assert before.dtype == after.dtype
        assert not after._is_view()
    assert got[1].stride() == sent[1].stride()
    assert got[4].is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(SerializationError, match="came in the CPU's memory"):
        receiver.load(answer.body, [bytearray(10_000_000) for _ in answer.buffers])
