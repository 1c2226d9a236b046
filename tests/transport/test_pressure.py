"""A peer that does not read holds up its senders, and nothing is lost by it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from stations import LARGE, Station, Threads, content, echo, request, soon, take

from farcall.errors import LinkError
from farcall.transport.base import Arrived, Link, LinkLost, NotSent
from farcall.transport.process_group.endpoint import ProcessGroupEndpoint
from farcall.wire.frames import Frame
from farcall.wire.messages import Reply

StationMaker = Callable[..., Station]


@pytest.fixture
def station(limited_station: StationMaker) -> StationMaker:
    return limited_station


@pytest.fixture
def blocked(near: Station, far: Station) -> Iterator[Link]:
    """Return a link whose other end does not read, with a frame half written."""
    link = near.connect(far)
    with pytest.raises(TimeoutError) as caught:
        link.send(request(1, LARGE, [b"end"]), time.monotonic() + 0.05)
    assert not isinstance(caught.value, NotSent)
    return link


def test_frame_that_does_not_fit_times_out_in_the_middle_and_arrives_whole_later(
    near: Station, far: Station, blocked: Link
) -> None:
    near.read()  # it is `next` that writes the rest
    far.read()
    assert content(far.arrived().frame) == content(request(1, LARGE, [b"end"]))


def test_frame_behind_a_half_written_one_is_not_sent(
    near: Station, far: Station, blocked: Link
) -> None:
    for deadline in (0.0, time.monotonic() + 0.02):
        with pytest.raises(NotSent):
            blocked.send(request(2), deadline)
        with pytest.raises(NotSent):
            blocked.exchange(request(3), deadline)
    near.read()
    far.read()
    assert far.arrived().frame.call_id == 1
    blocked.send(request(4), soon())
    assert far.arrived().frame.call_id == 4  # neither 2 nor 3 came


def test_senders_that_wait_behind_a_half_written_frame_go_on_in_the_end(
    near: Station, far: Station, blocked: Link, threads: Threads
) -> None:
    near.read()
    for number in range(2, 6):
        threads.start(blocked.send, request(number), soon())
    far.read()
    assert far.arrived().frame.call_id == 1
    assert sorted(far.arrived().frame.call_id for _ in range(4)) == [2, 3, 4, 5]


def test_exchange_behind_a_half_written_frame_goes_on_when_the_peer_reads_again(
    near: Station, far: Station, blocked: Link, threads: Threads
) -> None:
    for number in range(2, 5):
        threads.start(blocked.exchange, request(number), soon())
    near.read()
    far.read(lambda event: echo(event) if event.frame.call_id > 1 else None)
    threads.join()
    assert blocked.exchange(request(9), soon()).call_id == 9


def test_many_half_written_frames_one_after_the_other_arrive_whole(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read()
    link = near.connect(far)
    sent = []
    halves = 0
    for number in itertools.count(1):
        frame = request(number, b"b" * (number % 50), [LARGE[: 40_000 * number], b"end"])
        try:
            link.send(frame, time.monotonic() + 0.001)
        except NotSent:
            # The test has to read now, or the link stays full. If all has arrived, only the sender
            # does not know it yet.
            if sent:
                event = take(far.endpoint)
                assert isinstance(event, Arrived)
                assert content(event.frame) == content(sent.pop(0))
            continue
        except TimeoutError:
            halves += 1
        sent.append(frame)
        if halves == 10 or len(sent) > 8:
            break
    for frame in sent:
        event = take(far.endpoint)
        assert isinstance(event, Arrived)
        assert content(event.frame) == content(frame)


def test_half_written_frame_is_written_on_while_a_caller_waits_for_its_reply(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read()
    link = near.connect(far)
    threads.start(link.exchange, request(1), soon())
    first = take(far.endpoint)
    assert isinstance(first, Arrived)
    # The caller has the reading role now, and another thread leaves half a frame.
    with pytest.raises(TimeoutError):
        link.send(request(2, LARGE), time.monotonic() + 0.05)
    second = take(far.endpoint)
    assert isinstance(second, Arrived)
    assert content(second.frame) == content(request(2, LARGE))
    link.send(request(3), soon())
    third = take(far.endpoint)
    assert isinstance(third, Arrived)
    assert third.frame.call_id == 3
    first.link.send(Frame(Reply(), 1), soon())


@pytest.mark.stations(3)
def test_other_links_work_while_one_peer_does_not_read(
    station: StationMaker, near: Station, blocked: Link
) -> None:
    near.read()
    other = station("other")
    other.read()
    near.connect(other).send(request(9), soon())
    assert other.arrived().frame.call_id == 9


@pytest.mark.stations(3)
def test_flood_of_one_peer_keeps_no_other_one_from_being_heard(
    station: StationMaker, near: Station, far: Station, threads: Threads
) -> None:
    other = station("other")
    flooding, link = near.connect(far), other.connect(far)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                flooding.send(request(1), time.monotonic() + 0.05)

    threads.start(flood)
    try:
        assert take(far.endpoint)
        threads.start(link.send, request(9), soon())
        for _ in range(100_000):
            event = take(far.endpoint)
            if isinstance(event, Arrived) and event.frame.call_id == 9:
                break
        else:
            raise AssertionError("it was not heard")
    finally:
        over.set()


@pytest.mark.parametrize("ended_by", ["near", "far"])
def test_link_that_ends_with_half_a_frame_ends_its_senders(
    near: Station, far: Station, blocked: Link, threads: Threads, ended_by: str
) -> None:
    near.read()
    # A process group's endpoint that closes receives the frames on their way, which makes room for
    # more until the peer knows.
    may_go_on = ended_by == "far" and isinstance(far.endpoint, ProcessGroupEndpoint)

    def send() -> None:
        with contextlib.suppress(LinkError) if may_go_on else pytest.raises(LinkError):
            blocked.send(request(2), soon())

    for _ in range(3):
        threads.start(send)
    if ended_by == "near":
        near.endpoint.drop(far.worker.incarnation, "a test drops it")
    else:
        far.endpoint.close()
    threads.join()
    assert near.next_loss().link is blocked
    with pytest.raises(LinkError):
        blocked.send(request(3), soon())


def test_half_a_frame_of_a_dead_peer_is_not_delivered(
    near: Station, far: Station, blocked: Link
) -> None:
    near.endpoint.close()
    event = take(far.endpoint)
    if isinstance(event, Arrived):  # mpi takes nothing back: all of it, or nothing
        assert content(event.frame) == content(request(1, LARGE, [b"end"]))
        event = take(far.endpoint)
    assert isinstance(event, LinkLost)
    assert far.endpoint.links() == []
