"""`SocketLink` by itself. A large frame that is cut off: the link works on, or is lost."""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stations import keys_of, sealed

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.transport.connect.keys import Keys
from farcall.transport.sockets import link as socket_link
from farcall.transport.sockets.framing import FrameReader
from farcall.transport.sockets.link import SocketLink
from farcall.transport.sockets.poller import WRITE, EpollPoller, new_poller
from farcall.transport.sockets.records import Sealer
from farcall.transport.sockets.streams import source_of
from farcall.transport.spin import SpinBudget
from farcall.wire import frames
from farcall.wire.frames import DEFAULT_LIMITS, Frame
from farcall.wire.messages import Cancel, Reply, Request

LARGE = Frame(Reply(), 1, b"x" * (8 << 20))


class Cut(socket.socket):
    """Takes what fits, then fails as TCP keepalive does when the peer's host is dead."""

    def sendmsg(self, *args: Any) -> int:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")


@pytest.fixture
def poller() -> Iterator[EpollPoller]:
    made = new_poller()
    assert isinstance(made, EpollPoller)
    yield made
    made.close()


KEYS = [  # of the link, and of the test, which is the peer
    (None, None),
    (keys_of(dialled=True, encrypts=True), keys_of(dialled=False, encrypts=True)),
    (keys_of(dialled=True, encrypts=False), keys_of(dialled=False, encrypts=False)),
]
Both = tuple[Keys | None, Keys | None]


@pytest.fixture(params=KEYS, ids=["plain", "encrypted", "authenticated"])
def keys(request: pytest.FixtureRequest) -> Both:
    found: Both = request.param
    return found


def linked(
    sock: socket.socket,
    poller: EpollPoller,
    lost: list[str],
    on_frame: Callable[[SocketLink, Frame], None] = lambda link, frame: None,
    keys: Keys | None = None,
) -> SocketLink:
    link = SocketLink(
        sock,
        Worker("far", 1, 1),
        "pair",
        poller,
        SpinBudget(0),
        DEFAULT_LIMITS,
        on_frame=on_frame,
        on_link_lost=lambda link, cause: lost.append(cause),
        keys=keys,
    )
    link.start()
    return link


def test_timeout_of_the_kernel_loses_the_link_instead_of_looking_like_a_deadline(
    poller: EpollPoller, keys: Both
) -> None:
    near, far = socket.socketpair()
    lost: list[str] = []
    link = linked(Cut(fileno=near.detach()), poller, lost, keys=keys[0])
    with pytest.raises(LinkError, match="timed out"):
        link.send(LARGE, math.inf)
    link.service()  # as the endpoint's thread does: the main thread reads nothing
    assert len(lost) == 1
    with pytest.raises(LinkError):  # at once: no thread holds the role of the writer
        link.send(Frame(Cancel(), 2), math.inf)
    assert link.free()
    far.close()


def test_frame_whose_writer_is_interrupted_arrives_whole_and_so_does_the_next(
    poller: EpollPoller, keys: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = socket.socketpair()
    link = linked(near, poller, [], keys=keys[0])

    def interrupt(*args: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(socket_link, "_poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            link.send(LARGE, math.inf)
    next_one = threading.Thread(target=link.send, args=(Frame(Cancel(), 2), math.inf))
    next_one.start()
    reader, arrived = FrameReader(source_of(far, keys[1])), []
    far.setblocking(False)
    while len(arrived) < 2:
        for token, events in poller.wait(0.0):
            if token is link and events & WRITE:
                link.write_residue()
        while (frame := reader.read()) is not None:
            arrived.append(frame)
    next_one.join()
    assert [frame.call_id for frame in arrived] == [1, 2]
    assert bytes(arrived[0].body) == LARGE.body
    link.fail("the end")
    assert link.free()
    far.close()


@pytest.mark.parametrize("keys", KEYS[1:], indirect=True, ids=["encrypted", "authenticated"])
def test_bad_record_loses_the_link_with_a_cause_that_says_so(
    poller: EpollPoller, keys: Both
) -> None:
    near, far = socket.socketpair()
    lost: list[str] = []
    frames_read: list[Frame] = []
    link = linked(near, poller, lost, lambda link, frame: frames_read.append(frame), keys[0])
    assert keys[1] is not None
    sealer = Sealer(keys[1].sending, keys[1].encrypts)
    good, bad = (sealed(sealer, b"".join(frames.encode(Frame(Cancel(), n)))) for n in (1, 2))
    far.sendall(good + bad[:-1] + bytes([bad[-1] ^ 1]))
    link.service()
    link.service()
    assert [frame.call_id for frame in frames_read] == [1]
    (cause,) = lost
    assert cause.startswith("record 1 of the connection is not as the peer sealed it: it was alt")
    assert link.free()
    far.close()


def test_plain_frame_loses_a_link_with_keys(poller: EpollPoller) -> None:
    near, far = socket.socketpair()
    lost: list[str] = []
    link = linked(near, poller, lost, keys=keys_of(dialled=True, encrypts=True))
    far.sendall(b"".join(frames.encode(Frame(Cancel(), 1))))
    link.service()
    (cause,) = lost
    assert "record 0 of the connection claims" in cause
    assert link.free()
    far.close()


def test_link_that_is_lost_before_it_starts_leaves_its_closed_descriptor_alone() -> None:
    poller = new_poller()
    lost: list[str] = []
    near, far = socket.socketpair()
    peer = Worker("far", 1, 1)
    link = SocketLink(
        near,
        peer,
        "pair",
        poller,
        SpinBudget(0),
        DEFAULT_LIMITS,
        on_frame=lambda link, frame: None,
        on_link_lost=lambda link, cause: lost.append(cause),
    )
    link.fail("the peer was dropped meanwhile")
    assert link.free()  # by the endpoint's `next`
    link.start()
    assert lost == ["the peer was dropped meanwhile"]
    assert poller.wait(0.0) == []
    far.close()
    poller.close()


class Flood(socket.socket):
    """A socket that always has a next frame: in the bytes of one read, and beyond."""

    FRAMES = b"".join(frames.encode(Frame(Cancel(), 1))) * 3000
    ended = 0

    def recv_into(self, buffer: Any, *_: Any) -> int:  # type: ignore[override]
        count = min(len(buffer), len(self.FRAMES))
        start = self.ended % len(self.FRAMES)
        piece = (self.FRAMES + self.FRAMES)[start : start + count]
        buffer[:count] = piece
        self.ended += count
        return count


class Flooded:
    """A link to a peer that floods it."""

    MOST = 300_000  # frames, after which reading counts as endless

    def __init__(self, poller: EpollPoller) -> None:
        near, self.far = socket.socketpair()
        self.sock = Flood(fileno=near.detach())
        self.far.sendall(b"x")  # so that it can always be read
        self.frames = 0
        self.link = linked(self.sock, poller, [], self._on_frame)

    def _on_frame(self, link: SocketLink, frame: Frame) -> None:
        self.frames += 1
        assert self.frames < self.MOST, "it reads on and on"


@pytest.fixture
def flooded(poller: EpollPoller) -> Iterator[Flooded]:
    made = Flooded(poller)
    yield made
    made.link.fail("for the test")
    made.link.free()
    made.far.close()


def test_flood_is_read_bit_by_bit(flooded: Flooded) -> None:
    """Read bit by bit, so that other links get their turn, and the queue stays small."""
    for _ in range(3):
        before = flooded.frames
        flooded.link.service()
        assert 0 < flooded.frames - before < 5000


def test_caller_keeps_its_deadline_in_a_flood(flooded: Flooded) -> None:
    def call() -> None:
        with pytest.raises(TimeoutError):
            flooded.link.exchange(Frame(Request("f"), 7), time.monotonic() + 0.01)
        alarm, ringer = socket.socketpair()
        with alarm, ringer:
            kinds = frozenset({Reply})
            assert flooded.link.receive(kinds, alarm.fileno(), time.monotonic() + 0.01) is None

    with ThreadPoolExecutor(1) as pool:  # in the main thread another one would read for it
        pool.submit(call).result()
