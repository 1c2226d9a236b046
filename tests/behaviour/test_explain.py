"""`rpc.explain`: the path to another worker, and why it is not a better one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from clusters import patient_cluster

from behaviour.helpers import PATIENCE
from farcall import rpc
from farcall.errors import UnknownWorker
from farcall.ids import Worker, new_incarnation
from farcall.runtime.agent import Agent
from farcall.runtime.inspection import looking, paths
from farcall.runtime.membership.endpoints import open_endpoint
from farcall.testing.cluster import TRANSPORTS, acting_as
from farcall.transport.base import Means
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening
from farcall.transport.loopback import LoopbackLink

HERE = "box/9c1f/net:[4026531840]"


def nothing() -> None:
    return None


@pytest.fixture
def two(transport: str) -> Iterator[list[Agent]]:
    with patient_cluster(2, transport=transport) as agents, acting_as(agents[0]):
        yield agents


native = pytest.mark.skipif("native" not in TRANSPORTS, reason="there is no shared memory without")


@native
@pytest.mark.parametrize("transport", ["native"])
def test_the_best_path_has_no_drawback(two: list[Agent]) -> None:
    path = rpc.explain("w1")
    assert path.path.startswith("shm ")
    assert (path.drawback, path.protection, path.unreached) == ("", "local", "")
    assert (path.latency, path.bandwidth) == (None, None)
    assert "within this host and user" in str(path)


@pytest.mark.parametrize("transport", ["socket"])
def test_a_worker_without_the_native_transport_says_so(two: list[Agent]) -> None:
    path = rpc.explain("w1")
    assert path.path.startswith("unix ")
    assert "transport 'socket', which has no shared memory" in path.drawback
    assert f"no better path: {path.drawback}" in str(path)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_measurement_has_seconds_and_bytes_in_a_second(two: list[Agent]) -> None:
    path = rpc.explain("w1", measure=True)
    assert path.latency is not None
    assert 0 < path.latency < 1
    assert path.bandwidth is not None
    assert path.bandwidth > 1e6
    assert f"{path.latency * 1e6:.0f} us a call" in str(path)
    assert looking.received(two[1]) > paths.WARM_CALLS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_tells_of_calls_in_flight_and_received(two: list[Agent]) -> None:
    with acting_as(two[1]):
        for _ in range(3):
            rpc.rpc_sync("w0", nothing)
    future: rpc.Future[None] = rpc.Future()
    held = rpc.rpc_async("w1", forever)
    path = rpc.explain("w1")
    assert (path.in_flight, path.received, path.losses) == (1, 3, 0)
    held.cancel()
    future.set_result(None)


@rpc.functions.async_execution
def forever() -> rpc.Future[None]:
    return rpc.Future()


@pytest.mark.parametrize("transport", ["inproc"])
def test_it_tells_of_itself(two: list[Agent]) -> None:
    assert rpc.explain("w0").path == "loopback"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_worker_is_explained_too(two: list[Agent]) -> None:
    rpc.rpc_sync("w1", nothing)
    peer = two[0].directory.resolve("w1")
    two[0].losses.declare_lost(peer, "it was pulled out")
    path = rpc.explain("w1")
    assert "it was pulled out" in path.loss_cause
    assert str(path).endswith(f"is lost: {path.loss_cause}")
    with pytest.raises(UnknownWorker):
        rpc.explain("nobody")


@native
@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ({"paths": ("unix", "tcp")}, {}, "not among this worker's paths (option paths)"),
        ({}, {"paths": ("unix", "tcp")}, "w1 offers no shared memory"),
        ({"shared_memory": 0}, {}, "can create no more shared memory"),
        ({}, {}, ""),
    ],
)
def test_a_link_tells_why_it_has_no_shared_memory(
    mine: dict[str, Any], theirs: dict[str, Any], said: str
) -> None:
    with ExitStack() as stack:
        w0, w1 = [
            open_endpoint(
                ("native",), Identity(name, rank, new_incarnation(), "here"), Listening(**options)
            )
            for rank, (name, options) in enumerate((("w0", mine), ("w1", theirs)))
        ]
        stack.callback(w0.close)
        stack.callback(w1.close)
        worker = Worker("w1", 1, w1.me.incarnation, w1.addresses, "here")
        link = w0.connect(worker, time.monotonic() + PATIENCE)
        assert said in link.drawback
        assert bool(said) == bool(link.drawback)


class Over(LoopbackLink):
    """A link whose path is what a test says."""

    def __init__(self, path: str) -> None:
        self.description = path
        self.drawback = ""


@pytest.mark.parametrize(
    ("mine", "addresses", "host", "said"),
    [
        (("shm", "unix", "tcp"), (), "other/77/net", "it runs on another host, other"),
        (("shm", "unix", "tcp"), (), "box/9c1f/net:[1]", "another network namespace (a container)"),
        (("tcp",), ("unix:@farcall-1",), HERE, "among this worker's paths (option paths)"),
        (("shm", "unix", "tcp"), ("tcp://box:1",), HERE, "w1 listens on no Unix socket"),
        (("shm", "unix", "tcp"), ("unix:@farcall-1",), HERE, "may belong to another user"),
    ],
)
def test_why_a_link_goes_over_tcp(
    mine: tuple[str, ...], addresses: tuple[str, ...], host: str, said: str
) -> None:
    me = Worker("w0", 0, 1, host=HERE)
    worker = Worker("w1", 1, 2, addresses, host)
    assert said in paths.drawback(Over("tcp box:1"), Means("native", mine), me, worker)


def test_the_reasons_of_a_slow_tcp_path_are_said() -> None:
    me, worker = Worker("w0", 0, 1, host=HERE), Worker("w1", 1, 2, host="other/77/net")
    means = Means("socket", ("tcp",), "encrypted")
    said = paths.drawback(Over("tcp box:1"), means, me, worker)
    assert "the transport 'socket' uses one connection" in said
    assert "encrypt=False on all workers" in said


def test_the_protection_of_a_path() -> None:
    over = {path: paths.protection(Over(path), Means("native", (), "encrypted"))
            for path in ("shm pid 1", "unix pid 1", "tcp box:1", "loopback")}  # fmt: skip
    assert over == {
        "shm pid 1": "local", "unix pid 1": "local", "tcp box:1": "encrypted", "loopback": "local",
    }  # fmt: skip
