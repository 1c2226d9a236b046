"""Every conformance test runs over every transport, sockets with both kinds of poller."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from stations import InprocNet, Net, SocketNet, Station, Threads, use_selector_poller

StationMaker = Callable[..., Station]


def stations_of(net: Net) -> Iterator[StationMaker]:
    made: list[Station] = []

    def make(*args: object, **options: object) -> Station:
        made.append(net.station(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for station in made:
        station.close()


@pytest.fixture(params=["inproc", "socket", "socket with a secret", "socket without epoll"])
def station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations of one network, on every transport."""
    if request.param == "socket without epoll":
        use_selector_poller(request.getfixturevalue("monkeypatch"))
    secret = b"the secret" if request.param == "socket with a secret" else None
    net = InprocNet() if request.param == "inproc" else SocketNet(secret)
    yield from stations_of(net)


@pytest.fixture(params=["socket", "socket without epoll"])
def socket_station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations of one network, on the socket transport."""
    if request.param == "socket without epoll":
        use_selector_poller(request.getfixturevalue("monkeypatch"))
    yield from stations_of(SocketNet())


@pytest.fixture
def threads() -> Iterator[Threads]:
    running = Threads()
    yield running
    running.join()
