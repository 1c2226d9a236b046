"""The idle team of OpenMP threads: when it exists, and that libgomp counts it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from patience import PATIENCE
from torch.distributed import HashStore  # type: ignore[attr-defined]

from farcall import rpc
from farcall.runtime.membership.endpoints import EndpointPlace
from farcall.runtime.options import backend_options as options
from farcall.runtime.options.credential import Credential
from farcall.runtime.threads import openmp
from farcall.runtime.threads.openmp import FREQUENT_CALLS, FREQUENT_SECONDS, IdleTeam, find_libgomp
from farcall.transport.connect.credentials import shown_as_it_is
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import (
    Listening,
    admit_all,
    answer_nothing,
    first_meeting,
    vouch_for_all,
)

needs_libgomp = pytest.mark.skipif(
    find_libgomp() is None, reason="torch computes without libgomp here"
)


@pytest.fixture(autouse=True)
def _all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(openmp, "spare_cores", lambda: 1)


@pytest.fixture
def team() -> Iterator[IdleTeam]:
    team = IdleTeam("test", enabled=True)
    yield team
    team.close(time.monotonic() + PATIENCE)
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "farcall-openmp-test"]


def os_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def call_often(team: IdleTeam, begin: float = 100.0) -> None:
    """Call as an agent does, which notes a call only if the team asks for it."""
    for index in range(FREQUENT_CALLS + 1):
        now = begin + index * FREQUENT_SECONDS / 2
        if now >= team.asks_at:
            team.note(now)


class Pauses(threading.Event):
    """In the place of the event that ends a team: each pause is as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.over = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.release()
        return self.over.acquire(timeout=PATIENCE) and self.is_set()

    def set(self) -> None:
        super().set()
        self.over.release()


@needs_libgomp
def test_a_team_exists_while_calls_are_frequent(team: IdleTeam) -> None:
    team._closed = pauses = Pauses()
    assert threads() == []
    before = os_threads()
    call_often(team)
    assert len(threads()) == 1
    await_(lambda: len(os_threads() - before) == 2)  # its own thread, and one of libgomp's
    assert pauses.begun.acquire(timeout=PATIENCE)
    assert team.asks_at == 0.0  # it asks for the next call
    team.note(200.0)
    assert team.asks_at == math.inf
    pauses.over.release()
    assert pauses.begun.acquire(timeout=PATIENCE)
    assert len(threads()) == 1
    pauses.over.release()
    await_(lambda: threads() == [])  # no call came
    await_(lambda: os_threads() <= before)  # those of other tests may have ended
    assert team.asks_at == 0.0
    call_often(team, 300.0)
    assert len(threads()) == 1


@needs_libgomp
def test_rare_calls_make_no_team(team: IdleTeam) -> None:
    for index in range(10 * FREQUENT_CALLS):
        team.note(index * FREQUENT_SECONDS * 1.01)
    for pause in range(10):
        for index in range(FREQUENT_CALLS):
            team.note(1000.0 + pause + index * FREQUENT_SECONDS / 2)
    assert threads() == []


@needs_libgomp
def test_closing_ends_the_team_at_once(team: IdleTeam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "QUIET_SECONDS", math.nextafter(threading.TIMEOUT_MAX, 0))
    call_often(team)
    assert len(threads()) == 1
    team.close(time.monotonic() + PATIENCE)
    assert threads() == []
    call_often(team)
    team.note(1.0)
    assert threads() == []


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_user_decides(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    assert IdleTeam("test", enabled=True).asks_at == math.inf


def test_it_can_be_switched_off() -> None:
    assert IdleTeam("test", enabled=False).asks_at == math.inf


@pytest.mark.parametrize(
    ("threads_of_torch", "cores", "size"),
    [(1, 1, 0), (1, 8, 0), (2, 2, 2), (4, 8, 0), (5, 8, 5), (8, 8, 2), (16, 8, 0), (2, 1, 0)],
)
def test_the_size_makes_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch, threads_of_torch: int, cores: int, size: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads_of_torch)
    monkeypatch.setattr(openmp, "spare_cores", lambda: cores - 1)
    assert openmp.size_of_idle_team() == size
    assert size == 0 or threads_of_torch + size - 1 > cores


@pytest.mark.parametrize(
    ("threads_of_torch", "cores", "are_free"),
    [(1, 2, True), (2, 2, False), (4, 8, True), (5, 8, False), (8, 8, False), (16, 8, False)],
)
def test_a_worker_keeps_cores_awake_only_where_torch_leaves_some(
    monkeypatch: pytest.MonkeyPatch, threads_of_torch: int, cores: int, are_free: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads_of_torch)
    monkeypatch.setattr(openmp, "spare_cores", lambda: cores - 1)
    opened: list[Listening] = []
    monkeypatch.setattr(options, "open_endpoint", lambda _, __, how: opened.append(how))
    place = EndpointPlace(
        me=Identity("w0", 0, 1),
        admit=admit_all,
        vouch=vouch_for_all,
        shown=shown_as_it_is,
        meeting=first_meeting,
        answer=answer_nothing,
        credential=Credential(None, confined=False),
        listen=("127.0.0.1", 0),
        advertise=(),
        store=HashStore(),
        world_size=1,
        timeout=PATIENCE,
    )
    rpc.RpcBackendOptions().open_endpoint(place)
    assert [how.keep_awake for how in opened] == [are_free]


def test_a_thread_that_cannot_start_is_no_error(
    team: IdleTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        call_often(team)
    if find_libgomp() is not None:
        call_often(team, 200.0)  # later it can
        assert len(threads()) == 1


def test_where_no_team_is_of_use_it_is_asked_again_later(
    team: IdleTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 0
    monkeypatch.setattr(openmp, "size_of_idle_team", lambda: size)
    call_often(team, 100.0)
    asks_at = team.asks_at
    assert 100.0 < asks_at < math.inf
    size = 2  # `torch.set_num_threads`
    call_often(team, 100.0)
    assert threads() == []
    call_often(team, asks_at)
    assert len(threads()) == (find_libgomp() is not None)


def test_without_libgomp_nothing_is_done(team: IdleTeam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "find_libgomp", lambda: None)
    call_often(team)
    assert team.asks_at == math.inf
    assert threads() == []


@needs_libgomp
def test_the_number_of_torchs_threads_stays(team: IdleTeam) -> None:
    gomp = find_libgomp()
    assert gomp is not None
    before = gomp.omp_get_max_threads(), gomp.omp_get_dynamic()
    call_often(team)
    await_(lambda: team.asks_at == 0.0)
    assert (gomp.omp_get_max_threads(), gomp.omp_get_dynamic()) == before
