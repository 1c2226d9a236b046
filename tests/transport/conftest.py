"""Every conformance test runs over every transport, sockets with both kinds of poller."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator

import pytest
from stations import InprocNet, Net, SocketNet, Station, Threads

from farcall.transport import poller, socket, socket_link

StationMaker = Callable[..., Station]


def use_selector_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What platforms without epoll use."""
    for module in (poller, socket_link):
        monkeypatch.setattr(module, "READ", selectors.EVENT_READ)
    for module in (poller, socket_link, socket):
        monkeypatch.setattr(module, "WRITE", selectors.EVENT_WRITE)
    monkeypatch.setattr(socket, "new_poller", poller.SelectorPoller)


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
