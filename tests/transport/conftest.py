"""Every conformance test runs over every transport: sockets of every kind, with both pollers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from stations import InprocNet, Net, SocketNet, Station, Threads, use_selector_poller

StationMaker = Callable[..., Station]

needs_unix = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")

# What is dialled, by the name of the kind of network.
SOCKETS = {
    "tcp": "tcp:",
    "unix": "unix:",
    "tcp without epoll": "tcp:",
    "unix without epoll": "unix:",
}
SOCKET_KINDS = [
    pytest.param(kind, marks=needs_unix if by == "unix:" else ()) for kind, by in SOCKETS.items()
]


def stations_of(net: Net) -> Iterator[StationMaker]:
    made: list[Station] = []

    def make(*args: object, **options: object) -> Station:
        made.append(net.station(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for station in made:
        station.close()


def socket_stations(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    if request.param.endswith("without epoll"):
        use_selector_poller(request.getfixturevalue("monkeypatch"))
    yield from stations_of(SocketNet(by=SOCKETS[request.param]))


@pytest.fixture(params=["inproc", "sockets with a secret", *SOCKET_KINDS])
def station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations of one network, on every transport."""
    if request.param == "inproc":
        yield from stations_of(InprocNet())
    elif request.param == "sockets with a secret":
        yield from stations_of(SocketNet(b"the secret"))
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
