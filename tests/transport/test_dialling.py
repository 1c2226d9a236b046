"""Dialling a host with several addresses, and a name that can't be resolved."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from stations import LIMITS, soon

from farcall.errors import LinkError
from farcall.ids import Worker
from farcall.protocol.connecting import DialFailure
from farcall.transport.connect import addresses, race
from farcall.transport.connect.dialling import Ways, dial, failure_of
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening

Place = tuple[str, int]


@pytest.fixture
def listening() -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@pytest.fixture
def silent() -> Iterator[Place]:
    """Yield a place that answers no request for a connection, since its backlog is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()


@pytest.fixture
def refusing() -> Iterator[Place]:
    """Take a port without listening, so that no other process can listen there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()


def resolve_to(monkeypatch: pytest.MonkeyPatch, *places: Place) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
    monkeypatch.setattr(addresses, "resolve", lambda *_: found)


def test_an_address_that_is_silent_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch, silent: Place, listening: Place
) -> None:
    resolve_to(monkeypatch, silent, listening)
    made = None
    for seconds in (1.0, *LIMITS[2:]):
        begun = time.monotonic()
        with contextlib.suppress(TimeoutError):  # a slow machine needs more for the second half
            made = dial("tcp://host:1", seconds, 30.0)
            assert time.monotonic() - begun >= seconds / 2
            break
    assert made is not None
    with made[0] as sock:
        assert sock.getpeername() == listening


@pytest.mark.parametrize("refuses_first", [True, False])
def test_one_address_that_refuses_is_no_refusal_of_the_host(
    monkeypatch: pytest.MonkeyPatch, silent: Place, refusing: Place, refuses_first: bool
) -> None:
    resolve_to(monkeypatch, *((refusing, silent) if refuses_first else (silent, refusing)))
    with pytest.raises(TimeoutError):
        dial("tcp://host:1", 0.4, 30.0)


def test_a_host_all_of_whose_addresses_refuse_is_absent(
    monkeypatch: pytest.MonkeyPatch, refusing: Place
) -> None:
    resolve_to(monkeypatch, refusing, refusing)
    with pytest.raises(ConnectionRefusedError) as raised:
        dial("tcp://host:1", 10.0, 30.0)
    assert failure_of(raised.value) is DialFailure.ABSENT


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL])
def test_a_name_that_can_not_be_resolved_proves_nothing(code: int) -> None:
    assert failure_of(socket.gaierror(code, "says the name server")) is DialFailure.NO_ANSWER


def test_full_listener_is_asked_more_often_than_the_system_does() -> None:
    made: list[socket.socket] = []
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(socket.create_connection(server.getsockname()))  # and it is full

        def make() -> socket.socket:
            made.append(socket.socket())
            if len(made) == 2:  # the first is on its way, and the system won't ask for a second
                stack.enter_context(server.accept()[0])
            return made[-1]

        winner = stack.enter_context(race.connect(make, server.getsockname(), soon()))
        assert winner is made[1]
        assert made[0].fileno() < 0
        assert winner.getpeername() == server.getsockname()


def kinds_of(error: type[LinkError]) -> Iterator[type[LinkError]]:
    yield error
    for kind in error.__subclasses__():
        yield from kinds_of(kind)


@pytest.mark.parametrize("kind", [*kinds_of(LinkError)])
def test_refusal_of_any_kind_can_be_raised_anew_for_each_caller(kind: type[LinkError]) -> None:
    error = kind("why")
    assert str(type(error)(*error.args)) == "why"


NEAR, FAR = "tcp://127.0.0.1:1", "tcp://192.0.2.1:1"


@pytest.mark.parametrize(
    ("host", "confined", "tried"),
    [
        ("here", False, [NEAR, FAR]),
        ("here", True, [NEAR]),
        ("there", False, [FAR]),  # its loopback addresses are another process's here
        ("there", True, []),
    ],
)
def test_the_addresses_that_may_be_tried(host: str, confined: bool, tried: list[str]) -> None:
    worker = Worker("w1", 1, 1, (NEAR, FAR), host)
    ways = Ways(worker, Identity("w0", 0, 2, "here"), Listening(confined=confined))
    assert ways.urls == tried
