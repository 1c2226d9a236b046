"""`Link.receive`: a thread waits for some messages of a link, and takes only those."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from stations import Station, Threads, request, soon

from farcall.transport.base import Link
from farcall.transport.socket_link import SocketLink
from farcall.transport.waiter import Alarm
from farcall.wire import Frame, Leaving, Ran, ReleaseContext, encode

StationMaker = Callable[..., Station]
WANTED = frozenset((Ran,))
RAN = Frame(Ran(1, 2, 3, -1))


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.close()


@pytest.fixture
def near(networked_station: StationMaker) -> Station:
    return networked_station("near")


@pytest.fixture
def ends(near: Station, networked_station: StationMaker) -> tuple[Link, SocketLink]:
    """Both ends of a link."""
    far = networked_station("far")
    near.read()
    far.read()
    link = near.connect(far)
    link.send(request(1), soon())
    other = far.arrived().link
    assert isinstance(other, SocketLink)
    return link, other


def test_wanted_message_is_taken_and_others_go_to_next(
    near: Station, ends: tuple[Link, SocketLink], threads: Threads, alarm: Alarm
) -> None:
    link, other = ends
    taken: list[Frame | None] = []
    threads.start(lambda: taken.append(link.receive(WANTED, alarm.fileno(), soon())))
    while link.read_role.acquire(blocking=False):  # type: ignore[attr-defined]
        link.read_role.release()  # type: ignore[attr-defined]
    other.send(Frame(Leaving("a")), soon())
    other.send(Frame(ReleaseContext(1, 2)), soon())
    other.send(RAN, soon())
    threads.join()
    assert [frame and frame.message for frame in taken] == [RAN.message]
    assert [near.arrived().frame.message for _ in range(2)] == [Leaving("a"), ReleaseContext(1, 2)]


@pytest.mark.parametrize("sent", [0, 10, 40], ids=["nothing", "half a header", "half a message"])
def test_alarm_and_deadline_end_it_whatever_has_arrived(
    near: Station, ends: tuple[Link, SocketLink], alarm: Alarm, sent: int
) -> None:
    link, other = ends
    whole = b"".join(bytes(part) for part in encode(Frame(Leaving("a" * 100))))
    other._sock.send(whole[:sent])
    assert link.receive(WANTED, alarm.fileno(), time.monotonic() + 0.05) is None
    alarm.ring()
    assert link.receive(WANTED, alarm.fileno(), soon()) is None
    other._sock.send(whole[sent:])
    assert near.arrived().frame.message == Leaving("a" * 100)


def test_end_of_the_link_ends_it(
    ends: tuple[Link, SocketLink], threads: Threads, alarm: Alarm
) -> None:
    link, other = ends
    taken: list[Frame | None] = []
    threads.start(lambda: taken.append(link.receive(WANTED, alarm.fileno(), soon())))
    other.lose("enough")
    threads.join()
    assert taken == [None]


def test_only_one_thread_receives(ends: tuple[Link, SocketLink], alarm: Alarm) -> None:
    link, _ = ends
    with link.read_role:  # type: ignore[attr-defined]
        assert link.receive(WANTED, alarm.fileno(), soon()) is None
