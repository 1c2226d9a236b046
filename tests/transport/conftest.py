"""Every conformance test runs over every transport: sockets of every kind, with both pollers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any

import fake_mpi
import pytest
from collector import frozen  # noqa: F401  # a fixture
from sides import BareLink, Side, SideMaker
from stations import (
    AuthenticatingEndpoint,
    GroupNet,
    InprocNet,
    KeyedEndpoint,
    Net,
    SocketNet,
    Station,
    Threads,
    use_selector_poller,
)

from farcall.testing.cluster import connected
from farcall.transport.connect.connection import Connection

StationMaker = Callable[..., Station]

needs_unix = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")

GROUP_KINDS = ["process group", "process group by mpi"]
SOCKET_KINDS = [
    "tcp",
    pytest.param("unix", marks=needs_unix),
    "tcp without epoll",
    pytest.param("unix without epoll", marks=needs_unix),
    "tcp in records",
    "tcp in authenticated records",
]
needs_native = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

NATIVE_PATHS = {
    "shm": ("shm", "unix", "tcp"),
    "unix": ("unix", "tcp"),
    "tcp": ("tcp",),
    "striped": ("tcp",),
    "sealed": ("tcp",),  # with keys
    "sealed striped": ("tcp",),
}
# So small that most buffers of the tests are striped.
STRIPES = {"stripe_threshold": 1000, "stripe_chunk": 300}
NATIVE_KINDS = [pytest.param(f"native {path}", marks=needs_native) for path in NATIVE_PATHS]
# Tests that speak for a peer know no keys.
PLAIN_NATIVE_KINDS = NATIVE_KINDS[:-2]
SECRET_KINDS = ["tcp with a secret", pytest.param("unix with a secret", marks=needs_unix)]


def stations_of(net: Net) -> Iterator[StationMaker]:
    made: list[Station] = []

    def make(*args: object, **options: object) -> Station:
        made.append(net.station(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for station in made:
        station.close()


def native_net(path: str, by: str) -> SocketNet:
    from farcall.transport.native.endpoint import NativeEndpoint  # noqa: PLC0415 -- if it was compiled

    endpoint: Any = NativeEndpoint
    if "sealed" in path:
        from sealed import SealedEndpoint  # noqa: PLC0415

        endpoint = SealedEndpoint
    if "striped" not in path:
        return SocketNet(None, by, endpoint, paths=NATIVE_PATHS[path])
    make = partial(endpoint, **STRIPES)
    return SocketNet(None, by, make, paths=NATIVE_PATHS[path], streams=4)


def net_of(request: pytest.FixtureRequest) -> Net:
    """Return the network that `request.param` describes."""
    kind = request.param
    if kind == "inproc":
        return InprocNet()
    if kind in GROUP_KINDS:
        marker = request.node.get_closest_marker("stations")
        size = 2 if marker is None else marker.args[0]
        if kind == "process group":
            return GroupNet(connected(size))
        return GroupNet(fake_mpi.groups(size, request.getfixturevalue("monkeypatch")))
    if kind.startswith("native"):
        path = kind.partition(" ")[2]
        return native_net(path, by="tcp" if NATIVE_PATHS[path] == ("tcp",) else "unix")
    if kind.endswith("without epoll"):
        use_selector_poller(request.getfixturevalue("monkeypatch"))
    if kind.endswith("records"):
        make = AuthenticatingEndpoint if "authenticated" in kind else KeyedEndpoint
        return SocketNet(None, "tcp", make)
    secret = b"the secret" if kind.endswith("with a secret") else None
    return SocketNet(secret, by=kind.partition(" ")[0])


@pytest.fixture(params=["inproc", *GROUP_KINDS, *SOCKET_KINDS, *SECRET_KINDS, *NATIVE_KINDS])
def station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations of one network, on every transport."""
    yield from stations_of(net_of(request))


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Return the transport of a test that uses `station`."""
    return str(request.node.callspec.params["station"])


@pytest.fixture(params=[*SOCKET_KINDS, *PLAIN_NATIVE_KINDS])
def network(request: pytest.FixtureRequest) -> Net:
    """Return a network of the operating system, on every transport that uses one."""
    return net_of(request)


@pytest.fixture(
    params=["unix", *(pytest.param(path, marks=needs_native) for path in ("native unix", "shm"))]
)
def unix_network(request: pytest.FixtureRequest) -> SocketNet:
    """Stations know all addresses of each other, on every transport that uses Unix sockets."""
    if request.param == "unix":
        return SocketNet()
    return native_net(request.param.removeprefix("native "), by="")


@pytest.fixture(params=NATIVE_KINDS)
def native_station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations of one network, on the native transport."""
    yield from stations_of(net_of(request))


@pytest.fixture(params=[pytest.param("native shm", marks=needs_native)])
def shm_station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Makes stations that share memory."""
    yield from stations_of(net_of(request))


@pytest.fixture(params=[*GROUP_KINDS, *SOCKET_KINDS, *NATIVE_KINDS])
def limited_station(request: pytest.FixtureRequest) -> Iterator[StationMaker]:
    """Yield a maker of stations of one network, on transports whose senders wait for readers."""
    yield from stations_of(net_of(request))


@pytest.fixture
def networked_station(network: Net) -> Iterator[StationMaker]:
    """Makes stations of `network`."""
    yield from stations_of(network)


@pytest.fixture
def near(station: StationMaker) -> Station:
    """Return one of the two stations that most tests want; it is not read yet."""
    return station("near")


@pytest.fixture
def far(station: StationMaker) -> Station:
    return station("far")


@pytest.fixture
def threads() -> Iterator[Threads]:
    running = Threads()
    yield running
    running.join()


@pytest.fixture
def side() -> Iterator[SideMaker]:
    with ExitStack() as stack:

        def make(
            name: str, open_link: Callable[[Connection], BareLink] = BareLink, **options: Any
        ) -> Side:
            made = Side(name, open_link, **options)
            stack.callback(made.close)
            return made

        yield make
