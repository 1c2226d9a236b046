"""Every transport: frames arrive in order, whole, once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from stations import Station, Threads, content, request, soon, take

from farcall.errors import SerializationError
from farcall.transport.base import Arrived, Event
from farcall.transport.sockets.framing import READ_SIZE
from farcall.wire import frames
from farcall.wire.frames import HEADER, Frame, Limits
from farcall.wire.messages import MESSAGES, Cancel, Leaving, Register, Reply

StationMaker = Callable[..., Station]

# Around the alignment, and around what one read takes.
EDGES = [0, 1, 63, 64, 65, 127, 128, 4095, 4096, 4097]
READS = [READ_SIZE + d for d in (-130, -HEADER.size - 1, -HEADER.size, -64, -1, 0, 1, 63, 64, 65)]
MILLIONS = [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 24_000_001]


def filled(length: int, seed: int = 0) -> bytes:
    return random.Random(length ^ seed).randbytes(length)


@pytest.fixture
def pair(station: StationMaker) -> tuple[Station, Station]:
    near, far = station(), station()
    near.read()
    far.read()
    return near, far


def check_arrival(pair: tuple[Station, Station], frame: Frame) -> None:
    near, far = pair
    near.connect(far).send(frame, soon())
    assert content(far.arrived().frame) == content(frame)


def test_frames_of_one_thread_arrive_in_order(pair: tuple[Station, Station]) -> None:
    near, far = pair
    link = near.connect(far)
    for number in range(2000):
        link.send(request(number, filled(number % 90)), soon())
    arrived = [far.arrived().frame.call_id for _ in range(2000)]
    assert arrived == list(range(2000))


def test_frames_of_many_threads_arrive_whole_and_in_each_ones_order(
    pair: tuple[Station, Station], threads: Threads
) -> None:
    near, far = pair
    link = near.connect(far)

    def send(sender: int) -> None:
        for number in range(60):
            size = [10, 70_000, 300][number % 3]
            link.send(request(sender << 32 | number, filled(size, number), [filled(9)]), soon())

    for sender in range(6):
        threads.start(send, sender)
    arrived: dict[int, list[int]] = {sender: [] for sender in range(6)}
    for _ in range(6 * 60):
        frame = far.arrived().frame
        sender, number = frame.call_id >> 32, frame.call_id & 0xFFFFFFFF
        arrived[sender].append(number)
        assert frame.body == filled([10, 70_000, 300][number % 3], number)
        assert [bytes(b) for b in frame.buffers] == [filled(9)]
    assert list(arrived.values()) == [list(range(60))] * 6


def test_body_of_any_length_arrives_whole(pair: tuple[Station, Station]) -> None:
    for length in EDGES + READS + MILLIONS:
        check_arrival(pair, request(7, filled(length)))


def test_buffer_of_any_length_arrives_whole(pair: tuple[Station, Station]) -> None:
    for length in EDGES + READS + MILLIONS:
        check_arrival(pair, request(7, b"body", [filled(length), b"last"]))


def test_any_number_of_buffers_arrives_whole(pair: tuple[Station, Station]) -> None:
    for count in (1, 2, 63, 64, 65, 129, 2000):
        check_arrival(pair, request(7, b"body", [filled(n % 200) for n in range(count)]))


def test_empty_buffers_stay_empty_and_in_place(pair: tuple[Station, Station]) -> None:
    for count in (1, 64, 65, 300):
        check_arrival(pair, request(7, b"", [b""] * count))
        check_arrival(pair, request(7, b"", [b"", b"x", *[b""] * count, b"y", b""]))


def test_body_and_buffers_that_are_all_large_arrive_whole(pair: tuple[Station, Station]) -> None:
    buffers = [filled(3_000_001), b"", filled(5_000_000), filled(63)]
    check_arrival(pair, request(7, filled(2_000_003), buffers))


def test_mixed_sizes_one_after_the_other_arrive_whole(
    pair: tuple[Station, Station], threads: Threads
) -> None:
    near, far = pair
    link = near.connect(far)
    draw = random.Random(3)
    sizes = [0, 1, 60, 64, 1000, READ_SIZE - 40, READ_SIZE, 200_000]
    frames = [
        request(n, filled(draw.choice(sizes)), [filled(s) for s in draw.choices(sizes, k=n % 4)])
        for n in range(150)
    ]
    threads.start(lambda: [link.send(frame, soon()) for frame in frames])
    for frame in frames:
        assert content(far.arrived().frame) == content(frame)


def test_meta_that_is_larger_than_one_read_arrives_whole(pair: tuple[Station, Station]) -> None:
    entries = tuple((1 << 62, b"%d" % number, 1) for number in range(20_000))
    check_arrival(pair, Frame(Register(entries), 0))


def test_memory_of_a_sent_frame_may_be_used_again(pair: tuple[Station, Station]) -> None:
    near, far = pair
    buffer = bytearray(filled(500_000))
    before = bytes(buffer)
    near.connect(far).send(request(1, b"", [memoryview(buffer)]), soon())
    buffer[:] = bytes(len(buffer))
    assert bytes(far.arrived().frame.buffers[0]) == before


def test_memory_that_arrived_is_writable_and_not_shared(pair: tuple[Station, Station]) -> None:
    near, far = pair
    sent = bytearray(filled(2_000_000))
    before = bytes(sent)
    near.connect(far).send(request(1, b"", [sent, bytearray(b"small")]), soon())
    first, second = (memoryview(buffer) for buffer in far.arrived().frame.buffers)
    first[0] ^= 0xFF
    second[:] = b"SMALL"
    assert bytes(sent) == before


def test_every_kind_of_message_passes(pair: tuple[Station, Station]) -> None:
    plain = [
        message for message in MESSAGES.values() if not message.__struct_fields__
    ]  # without fields: nothing to fill in
    assert len(plain) >= 2
    for number, message in enumerate(plain):
        check_arrival(pair, Frame(message(), number))
    check_arrival(pair, Frame(Cancel(), 8))
    check_arrival(pair, Frame(Leaving("enough"), 9))


def test_links_of_both_directions_are_different_and_carry_frames_both_ways(
    pair: tuple[Station, Station],
) -> None:
    near, far = pair
    there, back = near.connect(far), far.connect(near)
    there.send(request(1), soon())
    back.send(request(2), soon())
    at_far, at_near = far.arrived(), near.arrived()
    assert at_far.link is not back
    assert at_near.link is not there
    at_far.link.send(Frame(Leaving(), 11), soon())
    at_near.link.send(Frame(Leaving(), 12), soon())
    answer_at_near, answer_at_far = near.arrived(), far.arrived()
    assert (answer_at_near.link, answer_at_near.frame.call_id) == (there, 11)
    assert (answer_at_far.link, answer_at_far.frame.call_id) == (back, 12)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Leaving("x" * 100_000)),
        Frame(Reply(), body=bytes(100_000)),
        Frame(Reply(), buffers=[bytes(8)] * 9),
        Frame(Reply(), buffers=[bytes(100_000)]),
        Frame(Reply(), buffers=[bytes(60_000)] * 3),
    ],
    ids=Limits._fields,
)
def test_frame_that_is_too_large_is_refused_and_the_link_goes_on(
    limited_station: StationMaker, frame: Frame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "SENDING_LIMITS", Limits(90_000, 90_000, 8, 90_000, 150_000))
    near, far = limited_station(), limited_station()
    near.read()
    far.read()
    link = near.connect(far)
    for _ in range(2):
        with pytest.raises(SerializationError, match="the limit is"):
            link.send(frame, soon())
        with pytest.raises(SerializationError, match="the limit is"):
            link.exchange(frame, soon())
    link.send(request(7, b"small", [bytes(90_000)]), soon())
    assert far.arrived().frame.call_id == 7


def test_link_says_who_is_at_the_other_end(pair: tuple[Station, Station]) -> None:
    near, far = pair
    link = near.connect(far)
    assert (link.peer.name, link.peer.id) == (far.worker.name, far.worker.id)
    assert link.peer.incarnation == far.worker.incarnation
    assert link.description
    link.send(request(), soon())
    back = far.arrived().link
    assert (back.peer.name, back.peer.incarnation) == (near.worker.name, near.worker.incarnation)


def test_connect_dials_once(pair: tuple[Station, Station], threads: Threads) -> None:
    near, far = pair
    links: list[object] = []
    for _ in range(8):
        threads.start(lambda: links.append(near.connect(far)))
    threads.join()
    assert len({id(link) for link in links}) == 1
    assert near.endpoint.links() == [links[0]]


def test_outcome_that_no_thread_waits_for_is_an_event(pair: tuple[Station, Station]) -> None:
    near, far = pair
    near.connect(far).send(Frame(Reply(), 5, b"late"), soon())
    assert content(far.arrived().frame) == (Reply(), 5, b"late", [])


def test_poll_returns_the_event_of_next_without_waiting(station: StationMaker) -> None:
    here, there = station(), station()
    assert there.endpoint.poll() is None
    link = here.connect(there)
    sent = [request(number) for number in range(1, 101)]
    for frame in sent:
        link.send(frame, soon())
    arrived: list[Event] = []
    while len(arrived) < len(sent):
        event = there.endpoint.poll() or take(there.endpoint)
        arrived.append(event)
    frames = [event.frame for event in arrived if isinstance(event, Arrived)]
    assert [content(frame) for frame in frames] == [content(frame) for frame in sent]
    assert there.endpoint.poll() is None
