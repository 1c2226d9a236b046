"""Every conformance test runs over every transport: sockets of every kind, with both pollers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from stations import InprocNet, Net, SocketNet, Station, Threads, use_selector_poller

StationMaker = Callable[..., Station]

needs_unix = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")

SOCKET_KINDS = [
    "tcp",
    pytest.param("unix", marks=needs_unix),
    "tcp without epoll",
    pytest.param("unix without epoll", marks=needs_unix),
]
needs_native = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

# By which addresses others are dialled, and which paths may be used.
NATIVE_PATHS = {
    "shm": ("unix", ("shm", "unix", "tcp")),
    "unix": ("unix", ("unix", "tcp")),
    "tcp": ("tcp", ("tcp",)),
}
NATIVE_KINDS = [pytest.param(f"native {path}", marks=needs_native) for path in NATIVE_PATHS]
SECRET_KINDS = ["tcp with a secret", pytest.param("unix with a secret", marks=needs_unix)]


def stations_of(net: Net) -> Iterator[StationMaker]:
    made: list[Station] = []

    def make(*args: object, **options: object) -> Station:
        made.append(net.station(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for station in made:
        station.close()


def socket_stations(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    kind = request.param
    if kind.endswith("without epoll"):
        use_selector_poller(request.getfixturevalue("monkeypatch"))
    secret = b"the secret" if kind.endswith("with a secret") else None
    yield from stations_of(SocketNet(secret, by=kind.partition(" ")[0]))


def native_stations(path: str) -> Iterator[StationMaker]:
    from farcall.transport.native import NativeEndpoint  # noqa: PLC0415 -- if it was compiled

    by, paths = NATIVE_PATHS[path]
    yield from stations_of(SocketNet(None, by, NativeEndpoint, paths=paths))


@pytest.fixture(params=["inproc", *SOCKET_KINDS, *SECRET_KINDS, *NATIVE_KINDS])
def station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations of one network, on every transport."""
    if request.param == "inproc":
        yield from stations_of(InprocNet())
    elif request.param.startswith("native"):
        yield from native_stations(request.param.partition(" ")[2])
    else:
        yield from socket_stations(request)


@pytest.fixture(params=SOCKET_KINDS)
def socket_station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations of one network, on the socket transport."""
    yield from socket_stations(request)


@pytest.fixture
def threads() -> Iterator[Threads]:
    running = Threads()
    yield running
    running.join()
