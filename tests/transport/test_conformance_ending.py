"""Every transport: connecting can fail, links end once and for a reason, endpoints close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from stations import PATIENCE, Station, Threads, echo, request, soon, take

from farcall.errors import LinkError
from farcall.ids import Worker, new_incarnation
from farcall.transport.base import Arrived, Link, LinkLost
from farcall.wire.frames import Frame
from farcall.wire.messages import Leaving

StationMaker = Callable[..., Station]


# Connecting.


def test_worker_that_is_gone_can_not_be_connected_to(near: Station, far: Station) -> None:
    far.endpoint.close()
    with pytest.raises(LinkError, match="far"):
        near.connect(far)
    assert near.endpoint.links() == []


def test_worker_without_addresses_can_not_be_connected_to(near: Station) -> None:
    nowhere = Worker("nowhere", 9, new_incarnation())
    with pytest.raises(LinkError, match="nowhere"):
        near.endpoint.connect(nowhere, soon())


def test_connect_goes_on_to_the_next_address(near: Station, far: Station) -> None:
    far.read(echo)
    known = far.worker
    addresses = ("unknown://somewhere", "tcp://127.0.0.1:1", *known.addresses)
    worker = Worker(known.name, known.id, known.incarnation, addresses)
    assert near.endpoint.connect(worker, soon()).exchange(request(1), soon()).call_id == 1


def test_admit_is_asked_for_name_and_incarnation(station: StationMaker, near: Station) -> None:
    asked: list[tuple[str, int]] = []
    gate = station("gate", lambda name, incarnation, _: asked.append((name, incarnation)))
    near.connect(gate)
    assert asked == [("near", near.worker.incarnation)]


def test_refusal_gives_the_reason(station: StationMaker, near: Station) -> None:
    gate = station("gate", lambda name, incarnation, _: f"{name} is not welcome")
    gate.read()
    with pytest.raises(LinkError, match="near is not welcome"):
        near.connect(gate)
    assert near.endpoint.links() == gate.endpoint.links() == []
    assert gate.events.empty()


def test_refused_worker_may_try_again(station: StationMaker, near: Station) -> None:
    reasons: list[str | None] = [None, "not yet"]
    gate = station("gate", lambda name, incarnation, _: reasons.pop())
    gate.read(echo)
    with pytest.raises(LinkError, match="not yet"):
        near.connect(gate)
    assert near.connect(gate).exchange(request(1), soon()).call_id == 1


def test_dropped_link_is_dialled_again_when_it_is_wanted(near: Station, far: Station) -> None:
    near.read()
    far.read(echo)
    first = near.connect(far)
    near.endpoint.drop(far.worker.incarnation, "a test drops it")
    second = near.connect(far)
    assert second is not first
    assert second.exchange(request(1), soon()).call_id == 1


# Losing.


def test_drop_is_reported_once_at_both_ends_with_the_cause_here(
    near: Station, far: Station
) -> None:
    near.read()
    far.read()
    link = near.connect(far)
    link.send(request(1), soon())
    back = far.arrived().link
    near.endpoint.drop(far.worker.incarnation, "a test drops it")
    assert near.next_loss() == LinkLost(link, "a test drops it")
    assert far.next_loss().link is back
    near.endpoint.drop(far.worker.incarnation, "again")
    far.endpoint.drop(near.worker.incarnation, "again")
    with pytest.raises(LinkError):
        link.send(request(2), soon())
    with pytest.raises(LinkError):
        back.send(request(2), soon())
    for one in (near, far):
        one.stop_reading()
        assert one.endpoint.next(0.0) is None
        assert one.events.empty()
        assert one.endpoint.links() == []


@pytest.mark.stations(3)
def test_drop_ends_the_links_of_both_directions_and_of_no_other_peer(
    station: StationMaker, near: Station, far: Station
) -> None:
    other = station("other")
    for one in (near, far, other):
        one.read(echo)
    links = {near.connect(far), near.connect(other)}
    far.connect(near).exchange(request(1), soon())
    near.endpoint.drop(far.worker.incarnation, "a test drops it")
    lost = {near.next_loss().link, near.next_loss().link}
    assert [link.peer.name for link in lost] == ["far", "far"]
    (left,) = near.endpoint.links()
    assert left in links
    assert left.exchange(request(2), soon()).call_id == 2


def test_drop_of_a_stranger_does_nothing(near: Station) -> None:
    near.endpoint.drop(new_incarnation(), "nobody")
    assert near.endpoint.next(0.0) is None


def test_loss_is_reported_after_the_last_frame(near: Station, far: Station) -> None:
    link = near.connect(far)
    for number in range(100):  # no more: no thread reads yet, and Unix sockets keep little
        link.send(request(number, b"b" * number * 10), soon())
    near.endpoint.close()
    events = [take(far.endpoint) for _ in range(101)]
    assert [e.frame.call_id for e in events if isinstance(e, Arrived)] == list(range(100))
    assert isinstance(events[-1], LinkLost)
    assert events[-1].cause


def test_last_frame_arrives_also_when_the_peer_is_writing(
    near: Station, far: Station, threads: Threads
) -> None:
    """Deliver a goodbye, although the link ends while frames come the other way."""
    far.read()
    link = near.connect(far)
    link.send(request(1), soon())
    back = far.arrived().link
    for number in range(50):
        back.send(Frame(Leaving(), number), soon())  # near never reads these
    link.send(Frame(Leaving("goodbye"), 99), soon())
    near.endpoint.close()
    assert far.arrived().frame.call_id == 99
    assert far.next_loss().link is back


def test_last_frame_arrives_also_when_a_writer_finds_the_end_first(
    near: Station, far: Station
) -> None:
    link = near.connect(far)
    link.send(request(1), soon())
    event = take(far.endpoint)
    event.link.send(Frame(Leaving("goodbye"), 7), soon())
    far.endpoint.close()

    def send_on() -> None:
        while True:
            link.send(request(2), soon())

    with pytest.raises(LinkError):
        send_on()
    events = [take(near.endpoint) for _ in range(2)]
    assert isinstance(events[0], Arrived)
    assert events[0].frame.call_id == 7
    assert isinstance(events[1], LinkLost)


@pytest.mark.stations(11)
def test_last_frame_arrives_while_many_threads_call(
    station: StationMaker, threads: Threads
) -> None:
    near = station("near")
    near.read()

    def call_on(link: Link, number: int, called: threading.Semaphore) -> None:
        for turn in range(number, 10_000_000, 4):
            if number % 2:
                link.exchange(request(turn), soon())
            else:
                link.send(Frame(Leaving("one-way")), soon())
            called.release()

    def call_to_the_end(*args: Any) -> None:
        with pytest.raises(LinkError):
            call_on(*args)

    for far in [station(f"far{turn}") for turn in range(10)]:
        far.read(echo)
        link = near.connect(far)
        assert link.exchange(request(9), soon()).call_id == 9
        (back,) = far.endpoint.links()
        called = threading.Semaphore(0)
        for number in range(1, 5):
            threads.start(call_to_the_end, link, number, called)
        for _ in range(50):
            assert called.acquire(timeout=PATIENCE)
        back.send(Frame(Leaving("goodbye"), 7), soon())
        far.close()
        threads.join()
        assert near.arrived().frame.message == Leaving("goodbye")
        assert near.next_loss().link is link
    assert near.events.empty()


# Waking and closing.


def test_wake_ends_a_next_that_waits(near: Station) -> None:
    entered = threading.Event()
    results: list[object] = []

    def wait() -> None:
        entered.set()
        results.append(near.endpoint.next(None))

    waiting = threading.Thread(target=wait)
    waiting.start()
    entered.wait(PATIENCE)
    near.endpoint.wake()
    waiting.join(PATIENCE)
    assert results == [None]


def test_wake_before_next_is_not_forgotten(near: Station) -> None:
    near.endpoint.wake()
    assert near.endpoint.next(PATIENCE) is None


def test_thousands_of_wakes_do_no_harm(near: Station, far: Station) -> None:
    for _ in range(20_000):
        near.endpoint.wake()
    far.connect(near).send(request(3), soon())
    event = take(near.endpoint)
    assert isinstance(event, Arrived)
    assert event.frame.call_id == 3


def test_next_returns_after_its_timeout(near: Station) -> None:
    assert near.endpoint.next(0.01) is None
    assert near.endpoint.next(0.0) is None


def test_close_ends_links_without_reporting_them_here(near: Station, far: Station) -> None:
    far.read()
    near.connect(far).send(request(1), soon())
    back = far.arrived().link
    near.endpoint.close()
    assert far.next_loss().link is back
    assert near.endpoint.links() == []
    near.endpoint.close()  # twice does no harm


def test_close_ends_threads_that_exchange_or_connect(
    near: Station, far: Station, threads: Threads
) -> None:
    far.read()
    link = near.connect(far)

    def call(number: int) -> None:
        with pytest.raises(LinkError):
            link.exchange(request(number), soon())

    for number in range(1, 5):
        threads.start(call, number)
    for _ in range(4):
        far.arrived()
    near.endpoint.close()
    threads.join()
    with pytest.raises(LinkError):
        link.send(request(9), soon())
    with pytest.raises(LinkError):
        near.connect(far)


def test_close_while_everybody_sends_ends_every_send(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read()
    far.read()
    link = near.connect(far)
    begun = threading.Semaphore(0)

    def send_on() -> None:
        for number in range(10_000_000):
            link.send(request(number, b"b" * 3000, [b"x" * 300]), soon())
            if number == 3:
                begun.release()

    def send() -> None:
        with pytest.raises(LinkError):
            send_on()

    for _ in range(4):
        threads.start(send)
    for _ in range(4):
        assert begun.acquire(timeout=PATIENCE)
    near.close()
    threads.join()


@pytest.mark.stations(13)
def test_workers_come_and_go_at_once(station: StationMaker, threads: Threads) -> None:
    hub = station("hub")
    hub.read(echo)
    made = [station(f"guest{n}") for n in range(12)]

    def visit(guest: Station) -> None:
        guest.read()
        for number in range(1, 20):
            assert guest.connect(hub).exchange(request(number), soon()).call_id == number
        guest.close()

    for guest in made:
        threads.start(visit, guest)
    threads.join()
    lost = sorted(hub.next_loss().link.peer.name for _ in range(12))
    assert lost == sorted(guest.worker.name for guest in made)
    assert hub.endpoint.links() == []
