"""Workers by name: what happens when the rendezvous can't be asked, or does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from behaviour.helpers import wait_until
from patience import PATIENCE

from farcall.errors import RpcTimeout, UnknownWorker
from farcall.ids import Worker, nth_incarnation
from farcall.protocol import lookup as lookup_rules
from farcall.protocol.directory import DISCARD_SECONDS
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.lookup import Lookup, NotAsked

ME = Worker("me", 0, 1)
OTHER = Worker("other", 1, 2)


class Store:
    """A rendezvous that does what the test says."""

    def __init__(self) -> None:
        self.worker: Worker | None = OTHER
        self.error: Exception | None = None
        self.reopened = 0
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def ask(self, _: str | int) -> Worker | None:
        self.asked += 1
        assert self.answers.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self.worker

    def reopen(self) -> None:
        self.reopened += 1
        self.error = None

    def cannot_reopen(self) -> None:
        self.reopened += 1
        raise ConnectionRefusedError("no process hosts it")


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.answers.set()


def directory(store: Store, *, returns: bool = True) -> Directory:
    reopen = store.reopen if returns else store.cannot_reopen
    return Directory(ME, [ME], Lookup("me", store.ask, reopen).find)


def soon() -> float:
    return time.monotonic() + PATIENCE


def test_a_worker_is_looked_up_once(store: Store) -> None:
    found = directory(store)
    assert found.resolve("other") is found.resolve("other") is found.known("other")
    assert store.asked == 1


def test_a_store_that_is_gone(store: Store) -> None:
    store.error = RuntimeError("Broken pipe\nand a trace of C++")
    found = directory(store, returns=False)
    found.find("somebody", soon())
    with pytest.raises(UnknownWorker, match="not be asked: no process hosts it; known workers"):
        found.resolve("somebody")
    assert found.resolve("me").worker is ME


def test_a_store_that_has_come_back(store: Store) -> None:
    store.error = RuntimeError("Broken pipe")
    assert directory(store).resolve("other").worker is OTHER
    assert store.reopened == 1


def test_a_store_that_is_silent(store: Store) -> None:
    store.answers.clear()
    found = directory(store)
    for to in ("other", "another", 5):
        with pytest.raises(RpcTimeout, match="could not be asked: it has not answered in time"):
            found.look_up(to, time.monotonic() + 0.01)
    assert store.asked == 1  # the other questions wait for the first
    store.answers.set()
    assert found.look_up("other", soon()).worker is OTHER


def test_many_callers_with_one_question_ask_once(store: Store) -> None:
    store.answers.clear()
    lookup = Lookup("me", store.ask, store.reopen)
    for _ in range(20):
        with pytest.raises(NotAsked):
            lookup.find("other", time.monotonic())
    store.answers.set()
    assert lookup.find("other", soon()) is OTHER
    assert store.asked <= 2


class StuckStore(Store):
    """A rendezvous that does not answer by its first connections."""

    def __init__(self, stuck: int) -> None:
        super().__init__()
        self.stuck = stuck
        self.answers.clear()

    def ask(self, key: str | int) -> Worker | None:
        if self.reopened < self.stuck:
            super().ask(key)
            raise RuntimeError("the connection of before broke")
        self.asked += 1
        return Worker(str(key), 1, hash(key))


def test_a_connection_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_rules, "STUCK_SECONDS", 0.05)
    store = StuckStore(stuck=1)
    lookup = Lookup("me", store.ask, store.reopen)
    with pytest.raises(NotAsked, match="not answered in time"):
        lookup.find("first", time.monotonic())
    machine = lookup._machine
    wait_until(lambda: machine._asked_at is not None)
    with pytest.raises(NotAsked, match="not answered in time"):
        lookup.find("second", time.monotonic())
    for name in ("first", "third", "second"):
        found = lookup.find(name, soon())
        assert found is not None
        assert found.name == name
    assert store.reopened == 1
    assert machine._stuck == 1
    store.answers.set()
    wait_until(lambda: machine._stuck == 0)
    assert lookup.find("fourth", soon()) is not None
    assert not machine._open


def test_a_store_that_stays_silent_costs_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_rules, "STUCK_SECONDS", 0.0)
    store = StuckStore(stuck=100)
    lookup = Lookup("me", store.ask, store.reopen)
    machine = lookup._machine
    for number in range(20):
        with pytest.raises(NotAsked):
            lookup.find(number, time.monotonic() + 0.01)
    assert store.asked <= 1 + lookup_rules.MOST_STUCK
    assert len(machine._open) == 20
    store.answers.set()
    wait_until(lambda: not machine._open)
    wait_until(lambda: machine._stuck == 0)


@pytest.mark.parametrize("to", [True, 0.0, None, b"me"])
def test_a_value_that_is_no_name_finds_no_worker(to: object) -> None:
    with pytest.raises(UnknownWorker, match="a worker is named by"):
        Directory(ME, [ME], None).resolve(to)  # type: ignore[arg-type]


# Those that were lost and are met again.


def again(worker: Worker, times: int = 1) -> Worker:
    incarnation = nth_incarnation(worker.incarnation, times)
    return msgspec.structs.replace(worker, incarnation=incarnation)


@pytest.fixture
def fixed() -> Directory:
    """Return the directory of a group of fixed size, whose other worker is lost."""
    workers = Directory(ME, [ME, OTHER], None)
    workers.resolve("other").note_loss("silent")
    return workers


def test_a_worker_that_is_met_again_is_known_by_name_id_and_number(fixed: Directory) -> None:
    assert fixed.meeting(OTHER.incarnation) == 1
    assert fixed.meet_again(OTHER.incarnation, 1, 0.0)
    assert not fixed.meet_again(OTHER.incarnation, 1, 0.0)
    assert fixed.meeting(OTHER.incarnation) == 1
    peer = fixed.newest(OTHER.incarnation)
    assert peer is not None
    assert peer.incarnation == again(OTHER).incarnation
    assert peer is fixed.resolve("other") is fixed.resolve(1) is fixed.add(OTHER)
    assert fixed.is_current(peer)
    assert [one.worker.name for one in fixed.live()] == ["me", "other"]


def test_earlier_meetings_are_forgotten_in_a_group_of_fixed_size_too(fixed: Directory) -> None:
    first = fixed.resolve(0)
    assert fixed.meet_again(OTHER.incarnation, 1, 0.0)
    assert len(fixed.all()) == 3
    assert fixed.on_peer_lost(first, DISCARD_SECONDS + 1) == []
    assert len(fixed.all()) == 2
    assert fixed.on_peer_lost(first, 2 * DISCARD_SECONDS + 2) == [OTHER.incarnation]
    assert fixed.resolve("other").incarnation == again(OTHER).incarnation


def test_number_of_the_next_meeting_is_kept_until_nothing_is_known_of_the_last(
    store: Store,
) -> None:
    workers = directory(store)
    peer = workers.resolve("other")
    peer.note_loss("silent")
    workers.on_peer_lost(peer, 0.0)
    assert workers.on_peer_lost(peer, DISCARD_SECONDS + 1) == []
    assert workers.of_incarnation(OTHER.incarnation) is None
    assert workers.meeting(OTHER.incarnation) == 1
    assert workers.resolve("other").incarnation == again(OTHER).incarnation
