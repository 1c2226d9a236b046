"""`Link.receive`: a thread waits for some messages of a link, and takes only those."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from stations import PATIENCE, Station, Threads, first_bytes_to, request, soon

from farcall.ids import Worker, new_incarnation
from farcall.transport.base import Link
from farcall.transport.connect import handshake
from farcall.transport.connect.conversation import drive
from farcall.transport.connect.credentials import Terms
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.waiter import Alarm
from farcall.wire.frames import Frame, encode
from farcall.wire.messages import CreditReturned, Leaving, ReleaseContext

StationMaker = Callable[..., Station]
WANTED = frozenset((CreditReturned,))
CREDIT_RETURNED = Frame(CreditReturned(1, 2, 3, -1))


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.close()


@pytest.fixture
def near(networked_station: StationMaker) -> Station:
    return networked_station("near")


@pytest.fixture
def ends(near: Station, networked_station: StationMaker) -> tuple[Link, Link]:
    """Return both ends of a link."""
    far = networked_station("far")
    near.read()
    far.read()
    link = near.connect(far)
    link.send(request(1), soon())
    return link, far.arrived().link


def test_wanted_message_is_taken_and_others_go_to_next(
    near: Station, ends: tuple[Link, Link], threads: Threads, alarm: Alarm
) -> None:
    link, other = ends
    taken: list[Frame] = []

    def receive() -> None:
        frame = None
        while frame is None:  # the endpoint's thread may be reading just now
            frame = link.receive(WANTED, alarm.fileno(), soon())
        taken.append(frame)

    threads.start(receive)
    messages = []
    sent = 0
    while not taken:
        for frame in (CREDIT_RETURNED, Frame(Leaving("a")), Frame(ReleaseContext(1, 2))):
            other.send(frame, soon())
        sent += 1
        messages.append(near.arrived().frame.message)
        while messages[-1] != ReleaseContext(1, 2):
            messages.append(near.arrived().frame.message)
    assert taken[0].message == CREDIT_RETURNED.message
    others = [message for message in messages if message != CREDIT_RETURNED.message]
    assert others == [Leaving("a"), ReleaseContext(1, 2)] * sent
    assert len(messages) == 3 * sent - 1  # what came before the thread was there, too


def test_only_one_thread_receives(ends: tuple[Link, Link], threads: Threads, alarm: Alarm) -> None:
    link, other = ends
    results: queue.Queue[Frame | None] = queue.Queue()
    for _ in range(4):
        threads.start(lambda: results.put(link.receive(WANTED, alarm.fileno(), soon())))
    assert [results.get(timeout=PATIENCE) for _ in range(3)] == [None] * 3
    other.send(CREDIT_RETURNED, soon())
    last = results.get(timeout=PATIENCE)
    assert last is not None
    assert last.message == CREDIT_RETURNED.message


def test_alarm_and_deadline_end_it(near: Station, ends: tuple[Link, Link], alarm: Alarm) -> None:
    link, other = ends
    assert link.receive(WANTED, alarm.fileno(), time.monotonic() + 0.05) is None
    alarm.ring()
    assert link.receive(WANTED, alarm.fileno(), soon()) is None
    other.send(Frame(Leaving("a")), soon())
    assert near.arrived().frame.message == Leaving("a")


@pytest.mark.parametrize("sent", [0, 10, 40], ids=["nothing", "half a header", "half a message"])
def test_alarm_and_deadline_end_it_whatever_has_arrived(
    near: Station, alarm: Alarm, threads: Threads, sent: int
) -> None:
    """Write by hand the bytes of a peer that we dialled."""
    near.read()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        known = Worker("far", 1, new_incarnation(), (f"tcp://{host}:{port}",))
        accepted: list[socket.socket] = []

        def accept() -> None:
            sock, _ = listener.accept()
            me = Identity(known.name, known.id, known.incarnation, addresses=known.addresses)
            drive(sock, handshake.accepting(me, Terms(), admit=lambda _: None), soon())
            accepted.append(sock)

        threads.start(accept)
        link = near.endpoint.connect(known, soon())
        threads.join()
    data = b"".join(bytes(part) for part in encode(Frame(Leaving("a" * 100))))
    whole = first_bytes_to(near.endpoint, data)
    with accepted.pop() as sock:
        sock.sendall(whole[:sent])
        assert link.receive(WANTED, alarm.fileno(), time.monotonic() + 0.05) is None
        alarm.ring()
        assert link.receive(WANTED, alarm.fileno(), soon()) is None
        sock.sendall(whole[sent:])
        assert near.arrived().frame.message == Leaving("a" * 100)


def test_end_of_the_link_ends_it(
    near: Station, ends: tuple[Link, Link], threads: Threads, alarm: Alarm
) -> None:
    link, other = ends
    taken: list[Frame | None] = []
    threads.start(lambda: taken.append(link.receive(WANTED, alarm.fileno(), soon())))
    other.fail("enough")  # type: ignore[attr-defined]
    threads.join()
    assert taken == [None]
    assert near.next_loss().link is link
