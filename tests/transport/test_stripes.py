"""Links over several TCP streams: how links get them, which may join, and how they end."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from descriptors import check_no_descriptors_left
from stations import SocketNet, Station, Threads, dial, echo, request, soon

from farcall.errors import LinkError
from farcall.ids import new_incarnation
from farcall.transport.base import Arrived, LinkLost, NotSent
from farcall.transport.connect import addresses, handshake
from farcall.transport.connect.credentials import LinkCredentials
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.sockets.endpoint import SocketEndpoint

pytestmark = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

LARGE = os.urandom(20_000)

StationMaker = Callable[..., Station]


@pytest.fixture(params=[None, b"the secret"], ids=["open", "secret"])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    return request.param


@pytest.fixture
def station(secret: bytes | None) -> Iterator[StationMaker]:
    from farcall.transport.native.endpoint import NativeEndpoint  # noqa: PLC0415 -- if it was compiled

    made: list[Station] = []

    def make(name: str, streams: int | None = 3, **options: Any) -> Station:
        low = partial(NativeEndpoint, stripe_threshold=1000, stripe_chunk=300)
        net = SocketNet(secret, "tcp", low, paths=("tcp",), streams=streams)
        made.append(net.station(name, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for an effect of other threads, which give no signal."""
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check_call(link: Any, call_id: int, data: bytes = LARGE) -> None:
    answer = link.exchange(request(call_id, b"", [data, b"small", data]), soon())
    assert [bytes(one) for one in answer.buffers] == [data, b"small", data]


def widened(near: Station, far: Station, streams: int = 3) -> Any:
    """Return a link that has all its streams at both ends."""
    near.read()
    far.read(echo)
    link: Any = near.connect(far)
    check_call(link, 1)
    wait_until(lambda: link.streams == streams and far_link(far).streams == streams)
    return link


def far_link(far: Station) -> Any:
    (link,) = far.endpoint.links()
    return link


def test_link_gets_more_streams_with_its_first_large_buffer(station: StationMaker) -> None:
    near, far = station("near"), station("far")
    near.read()
    far.read(echo)
    link: Any = near.connect(far)
    for number in range(1, 20):
        check_call(link, number, b"x" * 999)
    assert (link.streams, link.striped_buffers) == (1, 0)
    check_call(link, 20)
    wait_until(lambda: link.streams == 3 and far_link(far).streams == 3)
    before = link.striped_buffers, far_link(far).striped_buffers
    for number in range(21, 31):
        check_call(link, number)
    assert link.striped_buffers == before[0] + 20
    assert far_link(far).striped_buffers == before[1] + 20


def test_large_answer_is_enough(station: StationMaker) -> None:
    near, far = station("near"), station("far")
    near.read()
    far.read(lambda event: echo(Arrived(event.link, request(event.frame.call_id, b"", [LARGE]))))
    link: Any = near.connect(far)
    link.exchange(request(1), soon())
    wait_until(lambda: link.streams == 3)


@pytest.mark.parametrize(("near_streams", "far_streams"), [(1, 3), (3, 1), (0, 3)])
def test_both_sides_have_to_want_several(
    station: StationMaker, near_streams: int, far_streams: int
) -> None:
    near, far = station("near", near_streams), station("far", far_streams)
    near.read()
    far.read(echo)
    link: Any = near.connect(far)
    for number in range(1, 20):
        check_call(link, number)
    assert (link.streams, far_link(far).streams) == (1, 1)
    assert link.striped_buffers == far_link(far).striped_buffers == 0


def test_the_smaller_number_that_the_two_want_is_taken(station: StationMaker) -> None:
    assert widened(station("near", 5), station("far", 2), 2).streams == 2


@pytest.mark.parametrize(
    ("hosts", "is_loopback", "streams", "expected"),
    [
        (("here", "there"), False, None, 4),
        (("", ""), False, None, 4),
        (("here", "here"), False, None, 1),
        (("here", "there"), True, None, 1),
        (("here", "here"), True, 2, 2),
    ],
)
def test_only_links_to_other_hosts_have_several_by_default(
    station: StationMaker,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, str],
    is_loopback: bool,
    streams: int | None,
    expected: int,
) -> None:
    # There is nothing but loopback here.
    monkeypatch.setattr(addresses, "is_loopback", lambda _: is_loopback)
    monkeypatch.setattr(addresses, "is_loopback_name", lambda _: False)
    near, far = (station("w", streams, host=host) for host in hosts)
    near.read()
    far.read(echo)
    worker = msgspec.structs.replace(far.worker, host=hosts[1])
    link: Any = near.endpoint.connect(worker, soon())
    for number in range(1, 6):
        check_call(link, number)
    wait_until(lambda: link.streams == far_link(far).streams == expected)


def test_loopback_is_known(station: StationMaker) -> None:
    with dial(station("w")) as sock:
        assert addresses.is_loopback(sock)


@pytest.mark.parametrize("native_dials", [True, False])
def test_pure_python_has_one_stream(
    station: StationMaker, secret: bytes | None, native_dials: bool
) -> None:
    native = station("native")
    other = SocketNet(secret, "tcp", SocketEndpoint, paths=("tcp",)).station("python")
    try:
        near, far = (native, other) if native_dials else (other, native)
        near.read()
        far.read(echo)
        link = near.connect(far)
        for number in range(1, 10):
            check_call(link, number)
    finally:
        other.close()


def test_many_threads_share_the_streams(station: StationMaker, threads: Threads) -> None:
    near, far = station("near"), station("far")
    near.read()
    far.read(echo)
    link: Any = near.connect(far)

    def run(mark: int) -> None:
        for number in range(40):
            check_call(link, mark << 32 | number, os.urandom(500 + 1777 * number))

    for mark in range(4):
        threads.start(run, mark)
    threads.join()
    wait_until(lambda: link.streams == 3)


# Streams that may join.


def introduce(far: Station, me: Identity, secret: bytes | None) -> socket.socket:
    sock = dial(far)
    terms = LinkCredentials(secret).over(sock)
    handshake.connect(sock, me, terms, expects=far.worker.incarnation, deadline=soon())
    return sock


@pytest.fixture
def guest() -> Identity:
    return Identity("guest", 7, new_incarnation(), streams=3, link=secrets.token_bytes(32))


def joining(guest: Identity) -> Identity:
    return msgspec.structs.replace(guest, link=b"", joins=guest.link)


def test_join_of_an_unknown_link_is_refused(
    station: StationMaker, secret: bytes | None, guest: Identity
) -> None:
    far = station("far")
    with pytest.raises(LinkError, match="no link that it could join"):
        introduce(far, joining(guest), secret)


def test_join_by_another_incarnation_is_refused(
    station: StationMaker, secret: bytes | None, guest: Identity
) -> None:
    far = station("far")
    with introduce(far, guest, secret):
        wait_until(lambda: len(far.endpoint.links()) == 1)
        thief = msgspec.structs.replace(joining(guest), incarnation=new_incarnation())
        with pytest.raises(LinkError, match="no link that it could join"):
            introduce(far, thief, secret)
        with introduce(far, joining(guest), secret):
            wait_until(lambda: far_link(far).streams == 2)


def test_join_without_the_secret_is_refused(
    station: StationMaker, secret: bytes | None, guest: Identity
) -> None:
    far = station("far")
    wrong = None if secret else b"a secret"
    with introduce(far, guest, secret):
        wait_until(lambda: len(far.endpoint.links()) == 1)
        with pytest.raises(LinkError, match="FARCALL_SECRET"):
            introduce(far, joining(guest), wrong)
        assert far_link(far).streams == 1


def test_join_of_a_link_that_has_ended_is_refused(
    station: StationMaker, secret: bytes | None, guest: Identity
) -> None:
    far = station("far")
    far.read()
    introduce(far, guest, secret).close()
    far.next_loss()
    with pytest.raises(LinkError, match="no link that it could join"):
        introduce(far, joining(guest), secret)


def test_second_link_of_a_name_is_refused(
    station: StationMaker, secret: bytes | None, guest: Identity
) -> None:
    far = station("far")
    with (
        introduce(far, guest, secret),
        pytest.raises(LinkError, match="another link has this name"),
    ):
        introduce(far, guest, secret)


def test_more_streams_than_agreed_are_closed(
    station: StationMaker, secret: bytes | None, guest: Identity
) -> None:
    far = station("far")
    with introduce(far, guest, secret):
        sides = [introduce(far, joining(guest), secret) for _ in range(5)]
        wait_until(lambda: sum(map(is_closed, sides)) == 3)
        assert far_link(far).streams == 3
        for side in sides:
            side.close()


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


# The end.


def test_dropped_links_leave_no_connection_open(station: StationMaker) -> None:
    near, far = station("near"), station("far")
    link = widened(near, far)
    with check_no_descriptors_left():
        for number in range(30):
            near.endpoint.drop(far.worker.incarnation, "again")
            near.next_loss()
            far.next_loss()
            link = near.connect(far)
            check_call(link, number + 1)
            wait_until(lambda link=link: link.streams == 3 and far_link(far).streams == 3)


def test_endpoints_leave_no_connection_open(station: StationMaker) -> None:
    with check_no_descriptors_left():
        for _ in range(20):
            near, far = station("near"), station("far")
            near.read()
            far.read(echo)
            check_call(near.connect(far), 1)  # connections may be on their way
            near.close()
            far.close()


def test_end_in_the_middle_of_a_buffer_is_told_to_both(
    station: StationMaker, threads: Threads
) -> None:
    near, far = station("near"), station("far")
    link = widened(near, far)
    far.stop_reading()  # so that a large buffer gets stuck

    def send() -> None:
        with pytest.raises(LinkError):
            link.send(request(2, b"", [bytes(64 << 20)]), soon())

    before = link.striped_buffers
    threads.start(send)
    wait_until(lambda: link.striped_buffers > before)
    far.endpoint.drop(near.worker.incarnation, "enough")
    threads.join()
    assert isinstance(near.next(), LinkLost)


def test_deadline_in_the_middle_of_a_buffer_sends_the_rest_later(station: StationMaker) -> None:
    near, far = station("near"), station("far")
    link = widened(near, far)
    far.stop_reading()
    data = os.urandom(1 << 20) * 32
    with pytest.raises(TimeoutError) as error:
        link.send(request(2, b"", [data]), 0.0)  # what can be sent without waiting is sent
    assert not isinstance(error.value, NotSent)
    far._stopping = False
    far.read()
    assert far.arrived().frame.buffers[0] == data
