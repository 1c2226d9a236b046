"""A link whose reading is switched off holds up its sender, and nothing is lost by it."""

from __future__ import annotations

import contextlib
import threading

from stations import LARGE, Station, echo, request, soon

from farcall.transport.base import Arrived, Link, LinkLost, NotSent


def paused(near: Station, far: Station) -> Link:
    """Return the far end of a link that near has dialled, unread from now on."""
    far.read()
    near.connect(far).send(request(1), soon())
    arrived = far.arrived()
    arrived.link.set_reading(False)
    return arrived.link


def send_until_held_up(link: Link) -> int:
    """Returns how many frames were sent or begun."""
    count = 0
    while True:
        try:
            link.send(request(2 + count, LARGE), 0.0)
        except NotSent:
            return count
        except TimeoutError:
            return count + 1
        count += 1
        assert count < 1000, "nothing holds it up"


def test_sender_is_held_up_until_reading_goes_on(near: Station, far: Station) -> None:
    link = paused(near, far)
    near.read()
    count = send_until_held_up(near.connect(far))
    link.set_reading(True)
    got = [far.arrived().frame.call_id for _ in range(count)]
    assert got == list(range(2, 2 + count))
    near.connect(far).send(request(5000), soon())
    assert far.arrived().frame.call_id == 5000


def test_other_links_are_read_meanwhile(near: Station, far: Station) -> None:
    paused(near, far)
    near.read(echo)
    back = far.connect(near)
    for number in range(1, 20):
        assert back.exchange(request(number), soon()).call_id == number


def test_end_of_an_unread_link_is_reported_after_earlier_frames(
    near: Station, far: Station, kind: str
) -> None:
    link = paused(near, far)
    with contextlib.suppress(NotSent):  # some transports take it, and hold up later ones
        near.connect(far).send(request(2), 0.0)
    near.close()
    if kind.endswith("without epoll"):  # there only reading tells
        link.set_reading(True)
    events = [far.next()]
    while not isinstance(events[-1], LinkLost):
        events.append(far.next())
    assert [e.frame.call_id for e in events if isinstance(e, Arrived)] in ([2], [])


def test_switching_it_again_and_again_loses_nothing(near: Station, far: Station) -> None:
    link = paused(near, far)
    near.read()
    stop = threading.Event()

    def switch() -> None:
        is_on = False
        while not stop.is_set():
            is_on = not is_on
            link.set_reading(is_on)
        link.set_reading(True)

    switching = threading.Thread(target=switch)
    switching.start()
    sending = near.connect(far)
    for number in range(2, 300):
        sending.send(request(number), soon())
    stop.set()
    switching.join()
    assert [far.arrived().frame.call_id for _ in range(2, 300)] == list(range(2, 300))


def test_a_lost_link_may_be_switched(near: Station, far: Station) -> None:
    link = paused(near, far)
    far.endpoint.drop(near.worker.incarnation, "the test")
    link.set_reading(False)
    link.set_reading(True)
    assert far.endpoint.links() == []
