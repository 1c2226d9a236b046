"""The start of a worker has one deadline, however many waits it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from known_secrets import SECRET
from torch.distributed import HashStore

from farcall.autograd.autograd import Autograd
from farcall.errors import RendezvousTimeout
from farcall.ids import Worker
from farcall.runtime import start
from farcall.runtime.membership.rendezvous import Rendezvous
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.credential import Credentials
from farcall.runtime.quirks import Quirks

TIMEOUT = 20.0


class Clock:
    """A clock that stands until a wait takes its time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(start, "time", clock)
    return clock


def begin(size: int | None, timeout: float) -> NoReturn:
    """Start a worker at a store that opens, and says nothing from then on."""
    options = RpcBackendOptions(
        init_method="tcp://127.0.0.1:1",
        listen="127.0.0.1",
        secret=SECRET,
        transports=["socket"],
        rpc_timeout=timeout,
    )
    start.start_agent("w1", 1, size, options, Credentials(), 0, Quirks(), Autograd)
    raise AssertionError("it started")


@pytest.fixture
def waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[float]]:
    """Return what makes each wait of a start take a share of the time that it has.

    It returns the seconds that each wait had, in order: the opening of the store, the wait for the
    others, and that for the store's last word.
    """

    def take(share: float) -> list[float]:
        given: list[float] = []

        def open_slowly(*args: Any, **_: Any) -> tuple[HashStore, int, int | None]:
            given.append(args[3])
            clock.now += share * args[3]
            return HashStore(), args[1], args[2]

        def join(_: Rendezvous, worker: object, size: object, timeout: float, **__: Any) -> None:
            given.append(timeout)

        def bounded(run: Callable[[], object], seconds: float, late: Exception) -> NoReturn:
            run()
            given.append(seconds)
            raise late

        monkeypatch.setattr(start, "open_store", open_slowly)
        monkeypatch.setattr(start, "_check_kind", lambda *_: None)
        monkeypatch.setattr(Rendezvous, "join", join)
        monkeypatch.setattr(start, "bounded", bounded)
        return given

    return take


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0, 1.04])
def test_waits_of_a_start_end_by_one_deadline(
    clock: Clock, waits: Callable[[float], list[float]], size: int | None, share: float
) -> None:
    given, begun = waits(share), clock.now
    with pytest.raises(RendezvousTimeout, match=r"waited 20\.0 s: the store does not answer"):
        begin(size, TIMEOUT)
    store, others, last_word = given
    assert store == TIMEOUT
    spent = clock.now - begun
    assert 0 < others <= max(TIMEOUT - spent, start._LEAST_SECONDS)
    assert 0 < last_word <= max(TIMEOUT + start.LATE_SECONDS - spent, start._LEAST_SECONDS)
    assert start.LATE_SECONDS <= TIMEOUT / 20


@pytest.mark.parametrize("size", [None, 2])
def test_start_without_a_limit_has_none(
    waits: Callable[[float], list[float]], size: int | None
) -> None:
    given = waits(0.0)
    with pytest.raises(RendezvousTimeout):
        begin(size, 0.0)
    assert given[:2] == [0.0, 0.0]
    assert given[2] == start.threading.TIMEOUT_MAX
    assert not math.isinf(given[2])


def test_name_is_not_called_taken_when_no_time_is_left_to_ask_its_holder(
    clock: Clock, waits: Callable[[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have this process stopped for longer than its start may take."""
    waits(0.0)

    def join(*_: object, is_dead: Callable[[Worker], bool]) -> None:
        clock.now += TIMEOUT
        is_dead(Worker("w1", 1, 7, pid=4711, host="there"))

    monkeypatch.setattr(Rendezvous, "join", join)
    text = r"waited 20\.0 s: no time was left to ask whether 'w1', pid 4711 on there, still lives"
    with pytest.raises(RendezvousTimeout, match=text):
        begin(None, TIMEOUT)


def test_endpoint_that_waits_for_others_has_the_time_that_is_left(
    clock: Clock, waits: Callable[[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give it the remaining time, as an endpoint over a process group needs."""
    waits(0.75)
    seen: list[float] = []

    def open_endpoint(_: RpcBackendOptions, place: Any) -> NoReturn:
        seen.append(place.timeout)
        raise RendezvousTimeout("late")

    monkeypatch.setattr(RpcBackendOptions, "open_endpoint", open_endpoint)
    with pytest.raises(RendezvousTimeout, match="late"):
        begin(2, TIMEOUT)
    assert seen == [pytest.approx(TIMEOUT / 4)]
