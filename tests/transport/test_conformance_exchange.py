"""Every transport: `exchange` gets the outcome of its own call, everything else goes to `next`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from stations import PATIENCE, Station, Threads, content, echo, request, soon

from farcall.errors import LinkError
from farcall.transport.base import Arrived
from farcall.wire.frames import Frame
from farcall.wire.messages import Accepted, Failure, Leaving, Message, Register, Reply

StationMaker = Callable[..., Station]


@pytest.mark.parametrize("outcome", [Reply(), Failure("E", "message", "traceback"), Accepted()])
def test_exchange_returns_the_outcome_of_its_call(
    near: Station, far: Station, outcome: Message
) -> None:
    near.read()
    far.read(lambda e: e.link.send(Frame(outcome, e.frame.call_id, b"body", [b"x"]), soon()))
    answer = near.connect(far).exchange(request(8), soon())
    assert content(answer) == (outcome, 8, b"body", [b"x"])
    assert near.events.empty()


def test_exchange_needs_no_thread_that_reads_the_endpoint(
    station: StationMaker, near: Station, far: Station, threads: Threads
) -> None:
    # With the transports where callers receive their own replies; inproc delivers in the sender.
    far.read(echo)
    link = near.connect(far)
    for number in range(1, 50):
        assert link.exchange(request(number, b"b" * number), soon()).body == b"b" * number


@pytest.mark.parametrize("size", [0, 100, 70_000, 8_000_000])
def test_exchange_of_any_size_both_ways(near: Station, far: Station, size: int) -> None:
    near.read()
    far.read(echo)
    answer = near.connect(far).exchange(request(1, b"b" * size, [b"x" * size, b""]), soon())
    assert content(answer)[2:] == (b"b" * size, [b"x" * size, b""])


def test_many_exchanging_threads_on_one_link_get_their_own_outcomes(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read()
    far.read(echo)
    link = near.connect(far)

    def call(caller: int) -> None:
        for number in range(60):
            body = b"%d/%d" % (caller, number) * (2000 if number % 20 == 0 else 1)
            assert link.exchange(request(caller << 32 | number, body), soon()).body == body

    for caller in range(1, 9):
        threads.start(call, caller)
    threads.join()
    assert near.events.empty()


def test_outcomes_in_any_order_find_their_threads(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read()
    far.read()
    link = near.connect(far)
    answers: dict[int, bytes] = {}

    def call(number: int) -> None:
        answers[number] = bytes(link.exchange(request(number), soon()).body)

    for number in range(1, 7):
        threads.start(call, number)
    waiting = [far.arrived() for _ in range(6)]
    for event in sorted(waiting, key=lambda e: -e.frame.call_id):
        number = event.frame.call_id
        event.link.send(Frame(Reply(), number, b"%d" % number), soon())
    threads.join()
    assert answers == {number: b"%d" % number for number in range(1, 7)}


def test_frames_during_an_exchange_go_to_next_in_order(near: Station, far: Station) -> None:
    near.read()

    def answer(event: Arrived) -> None:
        link = event.link
        link.send(Frame(Register(((1, b"2", 3),)), 21), soon())
        link.send(Frame(Reply(), 22, b"somebody else's"), soon())
        link.send(Frame(Reply(), event.frame.call_id, b"own"), soon())
        link.send(Frame(Leaving(), 23), soon())

    far.read(answer)
    assert near.connect(far).exchange(request(5), soon()).body == b"own"
    assert [near.arrived().frame.call_id for _ in range(3)] == [21, 22, 23]


def test_exchanges_of_both_directions_go_on_at_once(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read(echo)
    far.read(echo)

    def call(one: Station, other: Station) -> None:
        link = one.connect(other)
        for number in range(1, 80):
            body = b"%d" % number * 500
            assert link.exchange(request(number, body), soon()).body == body

    for _ in range(2):
        threads.start(call, near, far)
        threads.start(call, far, near)
        threads.join()


def test_deadline_without_an_outcome_is_a_timeout(near: Station, far: Station) -> None:
    near.read()
    far.read()
    link = near.connect(far)
    with pytest.raises(TimeoutError):
        link.exchange(request(1), time.monotonic() + 0.02)
    # The late outcome is an event; the link goes on working.
    event = far.arrived()
    event.link.send(Frame(Reply(), 1, b"late"), soon())
    assert content(near.arrived().frame) == (Reply(), 1, b"late", [])
    event.link.send(Frame(Leaving(), 2), soon())
    assert near.arrived().frame.call_id == 2


def test_timeouts_and_answers_mixed_leave_every_answer_somewhere(
    near: Station, far: Station, threads: Threads
) -> None:
    """Give an outcome to its caller or, if that gave up, as an event; never to both."""
    near.read()
    far.read(echo)
    link = near.connect(far)
    got: set[int] = set()
    given_up: set[int] = set()

    def call(caller: int) -> None:
        for number in range(40):
            call_id = caller << 32 | number
            # 0 gives up at once, soon never, and the rest at any moment.
            deadline = [0.0, soon(), time.monotonic() + 0.0002][number % 3]
            try:
                link.exchange(request(call_id), deadline)
                got.add(call_id)
            except TimeoutError:
                given_up.add(call_id)

    for caller in range(1, 5):
        threads.start(call, caller)
    threads.join()
    assert got | given_up == {caller << 32 | n for caller in range(1, 5) for n in range(40)}
    link.exchange(request(1), soon())
    late = set()
    while not near.events.empty():
        late.add(near.arrived().frame.call_id)
    assert late <= given_up


def test_lost_link_ends_every_waiting_exchange(
    near: Station, far: Station, threads: Threads
) -> None:
    near.read()
    far.read()
    link = near.connect(far)
    ended: list[BaseException] = []

    def call(number: int) -> None:
        with pytest.raises(LinkError) as caught:
            link.exchange(request(number), soon())
        ended.append(caught.value)

    for number in range(1, 6):
        threads.start(call, number)
    for _ in range(5):
        far.arrived()
    far.endpoint.drop(near.worker.incarnation, "a test drops it")
    threads.join()
    assert len(ended) == 5
    assert near.next_loss().link is link


def test_exchange_goes_on_while_next_starts_and_ends(near: Station, far: Station) -> None:
    """Change the receiving thread all the time, and lose no outcome."""
    far.read(echo)
    link = near.connect(far)
    stop = threading.Event()

    def read_now_and_then() -> None:
        while not stop.is_set():
            near.endpoint.next(0.0005)

    reader = threading.Thread(target=read_now_and_then)
    reader.start()
    try:
        for number in range(1, 300):
            assert link.exchange(request(number), soon()).call_id == number
    finally:
        stop.set()
        reader.join(PATIENCE)
