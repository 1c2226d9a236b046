"""The link of a worker to itself keeps the contract of `Link`, as far as it applies."""

from __future__ import annotations

import queue
import time

import pytest
from stations import PATIENCE, Threads, content, request, soon

from farcall.errors import LinkError
from farcall.ids import Worker, new_incarnation
from farcall.transport.base import Arrived
from farcall.transport.loopback import LoopbackLink
from farcall.wire.frames import Frame
from farcall.wire.messages import Accepted, Failure, Leaving, Message, Reply

ME = Worker("me", 0, new_incarnation())
Posted = queue.SimpleQueue[Arrived]


@pytest.fixture
def posted() -> Posted:
    return queue.SimpleQueue()


@pytest.fixture
def link(posted: Posted) -> LoopbackLink:
    return LoopbackLink(ME, posted.put)


def test_its_peer_is_the_worker_itself(link: LoopbackLink) -> None:
    assert link.peer is ME
    assert link.description == "loopback"


@pytest.mark.parametrize("buffers", [[], [b""], [b"a", b"", b"c" * 100_000], [b"x"] * 300])
def test_frames_arrive_whole_and_in_order(
    link: LoopbackLink, posted: Posted, buffers: list[bytes]
) -> None:
    for number in range(20):
        link.send(request(number, b"body", buffers), soon())
    for number in range(20):
        event = posted.get(timeout=PATIENCE)
        assert event.link is link
        assert content(event.frame) == content(request(number, b"body", buffers))


def test_sender_and_receiver_share_no_memory(link: LoopbackLink, posted: Posted) -> None:
    mine = bytearray(b"mine")
    link.send(request(1, b"", [mine]), soon())
    theirs = posted.get(timeout=PATIENCE).frame.buffers[0]
    mine[:] = b"MINE"
    assert theirs == b"mine"
    memoryview(theirs)[:2] = b"th"
    assert mine == b"MINE"


@pytest.mark.parametrize("outcome", [Reply(), Failure("E", "message", "traceback"), Accepted()])
def test_exchange_returns_the_outcome_of_its_call(
    link: LoopbackLink, posted: Posted, threads: Threads, outcome: Message
) -> None:
    answers: dict[int, Frame] = {}

    def call(call_id: int) -> None:
        answers[call_id] = link.exchange(request(call_id), soon())

    for call_id in range(1, 6):
        threads.start(call, call_id)
    calls = sorted(posted.get(timeout=PATIENCE).frame.call_id for _ in range(5))
    for call_id in reversed(calls):
        link.send(Frame(outcome, call_id, b"%d" % call_id), soon())
    threads.join()
    assert {n: content(f) for n, f in answers.items()} == {
        n: (outcome, n, b"%d" % n, []) for n in calls
    }
    assert posted.empty()


def test_an_answer_that_no_thread_waits_for_is_posted(link: LoopbackLink, posted: Posted) -> None:
    link.send(Frame(Reply(), 5), soon())
    link.send(Frame(Leaving(), 6), soon())
    assert [posted.get(timeout=PATIENCE).frame.call_id for _ in range(2)] == [5, 6]


def test_late_outcome_of_an_exchange_that_gave_up_is_posted(
    link: LoopbackLink, posted: Posted
) -> None:
    with pytest.raises(TimeoutError):
        link.exchange(request(1), time.monotonic() + 0.01)
    link.send(Frame(Reply(), 1), soon())
    posted.get(timeout=PATIENCE)  # the request
    assert posted.get(timeout=PATIENCE).frame.message == Reply()


def test_lost_link_ends_every_exchange_and_takes_no_more(
    link: LoopbackLink, posted: Posted, threads: Threads
) -> None:
    def call(call_id: int) -> None:
        with pytest.raises(LinkError, match="the end"):
            link.exchange(request(call_id), soon())

    for call_id in range(1, 5):
        threads.start(call, call_id)
    for _ in range(4):
        posted.get(timeout=PATIENCE)
    link.fail("the end")
    link.fail("the end")
    threads.join()
    with pytest.raises(LinkError, match="the end"):
        link.send(request(9), soon())
    with pytest.raises(LinkError, match="the end"):
        link.exchange(request(9), soon())
