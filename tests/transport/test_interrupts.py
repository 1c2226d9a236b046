"""Ctrl-C ends every wait of the main thread, at once, and the link works on."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from stations import LARGE, PATIENCE, Station, Threads, echo, request, soon, take

from farcall.transport.base import Arrived, NotSent
from farcall.transport.waiter import Alarm
from farcall.wire.frames import Frame
from farcall.wire.messages import CreditReturned, Reply

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at threads in /proc")

StationMaker = Callable[..., Station]


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which shells ignore for tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def station(limited_station: StationMaker) -> StationMaker:
    return limited_station


def wait_until_blocked() -> None:
    """Wait until the main thread sleeps, and not for the GIL: it would get that meanwhile."""
    stat = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
    pause = threading.Event()
    seen = 0
    deadline = soon()
    while seen < 20:
        assert time.monotonic() < deadline, "the main thread does not sleep"
        seen = seen + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        pause.wait(0.001)


def interrupt(run: Callable[[], object], when: Callable[[], object] = wait_until_blocked) -> None:
    """Have Ctrl-C end what this runs."""

    def press() -> None:
        when()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    start = time.monotonic()
    try:
        thread.start()
        run()
        thread.join()
    except KeyboardInterrupt:
        thread.join()
        assert time.monotonic() < start + PATIENCE
    else:
        raise AssertionError("it ended by itself")


def test_exchange_is_interrupted(near: Station, far: Station) -> None:
    near.read()
    link = near.connect(far)
    interrupt(lambda: link.exchange(request(1), math.inf))
    event = take(far.endpoint)
    assert isinstance(event, Arrived)
    event.link.send(Frame(Reply(), 1), soon())
    assert near.arrived().frame.call_id == 1  # no caller waits for it any more
    far.read(echo)
    assert link.exchange(request(2), soon()).call_id == 2


def test_exchange_whose_reply_another_thread_would_read_is_interrupted(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read()
    link = near.connect(far)
    threads.start(link.exchange, request(1), soon())
    first = take(far.endpoint)
    assert isinstance(first, Arrived)
    interrupt(lambda: link.exchange(request(2), math.inf))
    first.link.send(Frame(Reply(), 1), soon())
    threads.join()
    far.read(echo)
    assert far.endpoint.links() != []
    assert link.exchange(request(3), soon()).call_id == 3


def test_send_to_a_peer_that_does_not_read_is_interrupted_and_arrives_whole(
    near: Station, far: Station
) -> None:
    near.read()
    link = near.connect(far)
    interrupt(lambda: link.send(request(1, LARGE), math.inf))
    far.read()
    assert bytes(far.arrived().frame.body) == LARGE
    link.send(request(2), soon())
    assert far.arrived().frame.call_id == 2


def test_exchange_with_a_peer_that_does_not_read_is_interrupted(
    near: Station, far: Station
) -> None:
    near.read()
    link = near.connect(far)
    interrupt(lambda: link.exchange(request(1, LARGE), math.inf))
    far.read(echo)
    reply = near.arrived().frame
    assert (reply.call_id, bytes(reply.body)) == (1, LARGE)
    assert link.exchange(request(2), soon()).call_id == 2


@pytest.mark.parametrize("exchange", [False, True], ids=["send", "exchange"])
def test_wait_for_the_role_of_writing_is_interrupted_and_sends_nothing(
    near: Station, far: Station, exchange: bool
) -> None:
    link = near.connect(far)
    with pytest.raises(TimeoutError) as caught:
        link.send(request(1, LARGE), time.monotonic() + 0.05)
    assert not isinstance(caught.value, NotSent)
    run = link.exchange if exchange else link.send
    interrupt(lambda: run(request(2), math.inf))
    near.read()
    far.read()
    link.send(request(3), soon())
    assert [far.arrived().frame.call_id for _ in range(2)] == [1, 3]


def test_next_is_interrupted(near: Station, far: Station) -> None:
    link = near.connect(far)
    interrupt(lambda: [far.endpoint.next(None) for _ in itertools.count()])
    link.send(request(1), soon())
    event = take(far.endpoint)
    assert isinstance(event, Arrived)
    assert event.frame.call_id == 1


def test_receive_is_interrupted(near: Station, far: Station) -> None:
    near.read()
    far.read(echo)
    link = near.connect(far)
    alarm = Alarm()
    try:
        interrupt(lambda: link.receive(frozenset((CreditReturned,)), alarm.fileno(), math.inf))
    finally:
        alarm.close()
    assert link.exchange(request(1), soon()).call_id == 1


def test_interrupt_at_any_moment_of_an_exchange_ends_it(
    native_station: StationMaker,
) -> None:
    """Interrupt it also while it spins, and between that and its sleep."""
    near, far = native_station("near"), native_station("far")
    near.read()
    far.read(lambda event: echo(event) if event.frame.body else None)
    link = near.connect(far)
    draw = random.Random(9)
    number = 0
    for _ in range(12):
        for _ in range(30):  # a peer that answers quickly is spun for
            number += 1
            assert link.exchange(request(number, b"quickly"), soon()).call_id == number
        number += 1
        unanswered = partial(link.exchange, request(number), time.monotonic() + 2 * PATIENCE)
        interrupt(unanswered, when=partial(threading.Event().wait, draw.uniform(0, 0.003)))
