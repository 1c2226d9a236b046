"""An attacker between two workers, or with all of one but its secret, can do nothing as it."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import msgspec
import pytest
from sides import SideMaker
from stations import PATIENCE, SocketNet, Station, echo, request, soon

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.transport.connect import dialling
from farcall.transport.connect.handshake_messages import DiallerReady, Hello, Proof
from farcall.transport.sockets.endpoint import SocketEndpoint
from farcall.wire.frames import encode

SECRET = bytes(range(32))
FRAME = b"".join(bytes(part) for part in encode(request(7, b"injected")))
STRANGE = (FRAME, b"\x16\x03\x01\xff\xff", b"\x17\x03\x03\x00\x05abcde")
needs_native = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

Change = Callable[[bytes], bytes]


class Relay:
    """Listens in front of a worker and passes on what goes through, until it is told to meddle."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self.change: Change = bytes  # of what the dialler says
        self.towards: queue.Queue[socket.socket] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                dialled = dialling.dial(self._url, PATIENCE, PATIENCE)
                assert dialled is not None
                theirs = dialled[0]
                theirs.setblocking(True)
                self._sockets += [ours, theirs]
                self.towards.put(theirs)
                for ends in ((ours, theirs, True), (theirs, ours, False)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, meddles: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(self.change(data) if meddles else data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture(params=["socket", pytest.param("native", marks=needs_native)])
def stations(request: pytest.FixtureRequest) -> Iterator[list[Station]]:
    make = SocketEndpoint
    if request.param == "native":
        make = import_module("farcall.transport.native.endpoint").NativeEndpoint
    net = SocketNet(SECRET, "tcp", make, paths=("tcp",), streams=1)
    made = [net.station("near"), net.station("far")]
    yield made
    for station in made:
        station.close()


def through(relay: Relay, station: Station) -> Worker:
    """Return the worker of a station that says it listens where the relay does."""
    endpoint, url = station.endpoint, relay.url
    me = endpoint.me  # type: ignore[attr-defined]
    me = msgspec.structs.replace(me, addresses=(*me.addresses, url))
    endpoint.me = me  # type: ignore[attr-defined]
    return msgspec.structs.replace(station.worker, addresses=(url,))


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


MEDDLING: dict[str, Change] = {
    "inject before": lambda data: FRAME + data,
    "inject behind": lambda data: data + FRAME,
    "change": flip,
    "repeat": lambda data: data + data,
}


@pytest.mark.parametrize("how", MEDDLING)
def test_relay_of_the_handshake_can_add_and_change_nothing(
    stations: list[Station], how: str
) -> None:
    near, far = stations
    served: queue.Queue[bytes] = queue.Queue()

    def answer(event: object) -> None:
        served.put(bytes(event.frame.body))  # type: ignore[attr-defined]
        echo(event)  # type: ignore[arg-type]

    near.read()
    far.read(answer)
    relay = Relay(far.worker.addresses[0])
    try:
        link = near.endpoint.connect(through(relay, far), soon())
        assert link.exchange(request(1, b"honest"), soon()).body == b"honest"
        relay.change = MEDDLING[how]
        with contextlib.suppress(LinkError, TimeoutError):
            link.exchange(request(2, b"meddled with"), soon())
        assert far.next_loss().cause
        heard = [served.get_nowait() for _ in range(served.qsize())]
        assert b"injected" not in heard
        assert heard.count(b"meddled with") <= 1
    finally:
        relay.close()


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("what", STRANGE, ids=("frame", "endless record", "record"))
def test_whatever_a_relay_puts_into_the_handshake_the_worker_goes_on(
    stations: list[Station],
    number: int,
    what: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    near, far = stations
    near.read()
    far.read()
    relay = Relay(far.worker.addresses[0])
    said = itertools.count(1)
    relay.change = lambda data: what if next(said) == number else data
    try:
        with contextlib.suppress(LinkError, TimeoutError):
            near.endpoint.connect(through(relay, far), time.monotonic() + 0.5)
    finally:
        relay.close()
    link = near.endpoint.connect(far.worker, soon())
    assert link.peer.name == "far"
    assert "internal error" not in caplog.text


def test_frame_behind_the_relayed_handshake_is_not_read(stations: list[Station]) -> None:
    near, far = stations
    near.read()
    far.read()
    relay = Relay(far.worker.addresses[0])
    try:
        near.endpoint.connect(through(relay, far), soon())
        connections = far.endpoint._connections  # type: ignore[attr-defined]
        deadline = soon()
        while not connections.of_peer(near.worker.incarnation):  # the last message is on its way
            assert time.monotonic() < deadline
            time.sleep(0.001)
        relay.towards.get(timeout=PATIENCE).sendall(FRAME)
        assert far.next_loss().cause
        assert far.events.empty()
    finally:
        relay.close()


# An attacker who knows everything of w1 but the secret.


def said_by(worker: object, *, secured: bool) -> list[bytes]:
    hello = Hello(
        "farcall",
        1,
        worker.name,  # type: ignore[attr-defined]
        worker.id,  # type: ignore[attr-defined]
        worker.incarnation,  # type: ignore[attr-defined]
        0,
        "",
        "",
        "",
        bytes(32),
        secured,
    )
    messages = [msgspec.msgpack.encode(one) for one in (hello, Proof(bytes(32)), DiallerReady())]
    return [struct.pack("<I", len(one)) + one for one in messages]


@pytest.mark.parametrize("path", ["tcp", "unix"])
@pytest.mark.parametrize("secured", [True, False])
@pytest.mark.parametrize("messages", range(4))
def test_connecting_and_closing_as_a_worker_does_not_end_it(
    side: SideMaker, path: str, secured: bool, messages: int
) -> None:
    near, distant = side("near", secret=SECRET), side("distant", secret=SECRET)
    near.connect(distant)
    while not distant.connections.of_peer(near.worker.incarnation):
        pass
    (kept,) = distant.connections.of_peer(near.worker.incarnation)
    (url,) = [url for url in distant.worker.addresses if url.startswith(path)]
    dialled = dialling.dial(url, PATIENCE, PATIENCE)
    assert dialled is not None
    with dialled[0] as sock:
        sock.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            for message in said_by(near.worker, secured=secured)[:messages]:
                sock.sendall(message)
    distant.connections.close()  # joins the threads of handshakes
    assert distant.connections.of_peer(near.worker.incarnation) == [kept]
    assert kept.loss_cause is None
