"""Strangers and broken peers get a clear refusal, and hurt no other worker."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stations import (
    PATIENCE,
    SocketNet,
    Station,
    dial,
    echo,
    first_bytes_from_dialler,
    request,
    soon,
)

from farcall.errors import AuthenticationFailed, LinkError
from farcall.ids import Worker, new_incarnation
from farcall.transport.connect import addresses, handshake
from farcall.transport.connect.credentials import Terms
from farcall.transport.connect.handshake_messages import Identity
from farcall.wire.frames import HEADER, MAGIC, VERSION, Limits, encode
from farcall.wire.messages import Kind

StationMaker = Callable[..., Station]

HUGE = 1 << 60


def dial_as_worker(station: Station) -> socket.socket:
    """Open a connection by a correct handshake, on which a test says what it likes."""
    sock = dial(station)
    me = Identity("crafty", 7, new_incarnation())
    handshake.connect(sock, me, Terms(), expects=0, deadline=soon())
    return sock


def say(sock: socket.socket, data: bytes) -> None:
    """Send all that there is to say, and wait until the other side ends the connection."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it has ended the connection already
    assert_closed(sock)


def assert_closed(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass


@pytest.fixture
def far(networked_station: StationMaker) -> Station:
    return networked_station("far")


@pytest.fixture
def bystander(networked_station: StationMaker, far: Station) -> Iterator[None]:
    """Watch a worker whose link to far must still be good at the end."""
    far.read(echo)
    near = networked_station("bystander")
    near.read()
    link = near.connect(far)
    yield
    assert link.exchange(request(1, b"still here"), soon()).body == b"still here"
    assert near.connect(far) is link
    assert near.events.empty()


@pytest.fixture
def warnings() -> Iterator[queue.Queue[str]]:
    """Collect the transport's warnings; some may come after the connection is closed."""
    logged: queue.Queue[str] = queue.Queue()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.put(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("farcall.transport").addHandler(handler)
    yield logged
    logging.getLogger("farcall.transport").removeHandler(handler)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# Frames that lie.


def header(
    *,
    meta: int = 1,
    count: int = 0,
    body: int = 0,
    magic: bytes = MAGIC,
    version: int = VERSION,
    kind: int = Kind.REQUEST,
) -> bytes:
    return HEADER.pack(magic, version, kind, 0, meta, count, 1, body)


LIES = {
    "a body of 2^60 bytes": (header(body=HUGE), f"a body of {HUGE} bytes"),
    "a buffer of 2^60 bytes": (
        header(kind=Kind.CANCEL, count=1) + struct.pack("<Q", HUGE) + b"\x90",
        f"claims {HUGE} bytes for buffer 0",
    ),
    "buffers of 2^40 bytes each": (
        header(kind=Kind.CANCEL, count=3) + struct.pack("<3Q", *[1 << 40] * 3) + b"\x90",
        "bytes in all",
    ),
    "2^32 - 1 buffers": (header(count=(1 << 32) - 1), "buffers"),
    "2^32 - 1 bytes of metadata": (header(meta=(1 << 32) - 1), "bytes of metadata"),
    "another magic": (header(magic=b"HTTP"), "not a farcall frame"),
    "another version": (header(version=9), "frame version 9"),
    "an unknown kind": (header(kind=200), "unknown frame kind 200"),
    "broken metadata": (header(meta=5) + b"\xc1" * 5, "broken REQUEST message"),
    "metadata of another type": (header(meta=1) + b"\x90", "broken REQUEST message"),
}


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("lie", LIES)
def test_frame_that_lies_loses_its_own_link_with_a_clear_error(far: Station, lie: str) -> None:
    data, complaint = LIES[lie]
    before = resident_bytes()
    with dial_as_worker(far) as sock:
        sock.sendall(first_bytes_from_dialler(far.endpoint, data))
        assert complaint in far.next_loss().cause
        assert_closed(sock)
    assert resident_bytes() - before < 64 << 20


@pytest.mark.usefixtures("bystander")
def test_claim_within_the_limits_costs_nothing_until_the_bytes_come(far: Station) -> None:
    before = resident_bytes()
    with dial_as_worker(far) as sock:
        say(sock, first_bytes_from_dialler(far.endpoint, header(body=8 << 30)))
        assert "closed the connection" in far.next_loss().cause
    assert resident_bytes() - before < 64 << 20


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("cut", [1, 31, 32, 33, 60, 2_000, 70_000, 300_000])
def test_frame_that_ends_early_is_a_lost_link_and_no_frame(far: Station, cut: int) -> None:
    whole = b"".join(bytes(p) for p in encode(request(1, b"b" * 100_000, [b"x" * 250_000])))
    with dial_as_worker(far) as sock:
        say(sock, first_bytes_from_dialler(far.endpoint, whole[:cut]))
        assert "closed the connection" in far.next_loss().cause


def test_limits_are_the_endpoints_own(networked_station: StationMaker) -> None:
    near = networked_station("near")
    strict = networked_station("strict", limits=Limits(body=1000, buffer=1000, frame=1500))
    strict.read()
    for frame in (
        request(1, b"b" * 1001),
        request(1, b"", [b"b" * 1001]),
        request(1, b"", [b"b" * 800] * 2),
    ):
        near.connect(strict).send(frame, soon())
        assert "the limit is" in strict.next_loss().cause
        near.endpoint.drop(strict.worker.incarnation, "again")
    near.connect(strict).send(request(2, b"b" * 1000), soon())
    assert strict.arrived().frame.call_id == 2


# Strangers.


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
        b"\0" * 64,
        b"\xff" * 5000,
        b"".join(bytes(p) for p in encode(request(1))),
    ],
    ids=["http", "tls", "zeros", "ones", "a frame without handshake"],
)
def test_stranger_is_shown_the_door(far: Station, warnings: queue.Queue[str], data: bytes) -> None:
    far.read()
    with dial(far) as sock:
        say(sock, data)
        who = "127.0.0.1:" if sock.family == socket.AF_INET else f"pid {os.getpid()} (uid "
        assert f"refused a connection from {who}" in warnings.get(timeout=PATIENCE)
    assert far.events.empty()


def test_a_worker_that_dies_while_dialling_is_not_said_to_be_refused(
    far: Station, caplog: pytest.LogCaptureFixture
) -> None:
    far.read()
    caplog.set_level(logging.DEBUG, "farcall.transport")
    with dial(far) as sock:
        say(sock, b"")
    far.close()  # joins the threads of handshakes
    said = [record for record in caplog.records if "while it dialled" in record.message]
    assert [record.levelno for record in said] == [logging.DEBUG]
    assert "refused a connection" not in caplog.text


def test_strangers_fill_no_log(far: Station, caplog: pytest.LogCaptureFixture) -> None:
    far.read()
    for _ in range(30):
        with dial(far) as sock:
            say(sock, b"GET / HTTP/1.1\r\n\r\n")
    far.close()
    refused = [record for record in caplog.records if "refused a connection" in record.message]
    assert len(refused) == 1


def test_wrong_secret_is_named_although_its_host_has_had_its_line(
    networked_station: StationMaker, warnings: queue.Queue[str]
) -> None:
    far = networked_station("far", secret=b"right")
    far.read()
    with dial(far) as sock:
        say(sock, b"GET / HTTP/1.1\r\n\r\n")
    assert "refused a connection" in warnings.get(timeout=PATIENCE)
    for _ in range(3):
        with pytest.raises(AuthenticationFailed):
            networked_station("near", secret=b"wrong").connect(far)
    assert "check FARCALL_SECRET" in warnings.get(timeout=PATIENCE)
    far.close()  # joins the threads of handshakes
    assert warnings.empty()


@pytest.mark.usefixtures("bystander")
def test_random_bytes_at_the_address_do_nothing(far: Station) -> None:
    draw = random.Random(7)
    for _ in range(60):
        with dial(far) as sock:
            say(sock, draw.randbytes(draw.randrange(1, 3000)))
    assert far.events.empty()


@pytest.mark.usefixtures("bystander")
def test_random_bytes_after_a_correct_handshake_lose_that_link_only(far: Station) -> None:
    draw = random.Random(8)
    for _ in range(30):
        with dial_as_worker(far) as sock:
            say(sock, draw.randbytes(draw.randrange(1, 3000)))
        assert far.next_loss().cause


def test_silent_strangers_do_not_keep_a_worker_from_connecting(
    networked_station: StationMaker, far: Station
) -> None:
    far.read(echo)
    near = networked_station("near")
    with contextlib.ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(dial(far))
        assert near.connect(far).exchange(request(1), soon()).call_id == 1


def test_worker_connects_after_connections_could_not_be_accepted(
    networked_station: StationMaker,
    far: Station,
    warnings: queue.Queue[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, failures = addresses.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept_if_possible(listener: socket.socket) -> tuple[socket.socket, str, str]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(addresses, "accept", accept_if_possible)
    networked_station("near").connect(far)
    assert "could not accept a connection: [Errno 24]" in warnings.get(timeout=PATIENCE)


def test_silent_strangers_do_not_hold_up_closing(far: Station) -> None:
    with contextlib.ExitStack() as strangers:
        socks = [strangers.enter_context(dial(far)) for _ in range(5)]
        far.endpoint.close()
        for sock in socks:
            assert_closed(sock)


# Secrets and incarnations.


@pytest.mark.parametrize("ours", [b"wrong", None])
@pytest.mark.parametrize("theirs", [b"right", None])
def test_links_need_the_same_secret_on_both_sides(
    networked_station: StationMaker, ours: bytes | None, theirs: bytes | None
) -> None:
    near, far = networked_station("near", secret=ours), networked_station("far", secret=theirs)
    near.read()
    far.read(echo)
    if ours == theirs:
        assert near.connect(far).exchange(request(1), soon()).call_id == 1
        return
    with pytest.raises(AuthenticationFailed, match="FARCALL_SECRET"):
        near.connect(far)
    assert near.endpoint.links() == far.endpoint.links() == []
    assert near.events.empty()
    assert far.events.empty()


def test_another_incarnation_at_the_address_is_not_taken_for_the_one_meant(
    networked_station: StationMaker, far: Station
) -> None:
    near = networked_station("near")
    known = far.worker
    former = Worker(known.name, known.id, new_incarnation(), known.addresses)
    with pytest.raises(LinkError, match="it restarted"):
        near.endpoint.connect(former, soon())
    assert far.endpoint.links() == near.endpoint.links() == []


def test_unbindable_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LinkError, match=f"can't listen on 127.0.0.1:{port}"):
            SocketNet().station(listen=("127.0.0.1", port))
