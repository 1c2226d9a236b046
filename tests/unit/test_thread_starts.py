"""The places where farcall starts threads: the system may have none left."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
from clusters import patient_cluster
from patience import PATIENCE
from threads_left import check_no_threads_left, threads_since

import farcall
from farcall import rpc
from farcall.errors import FarcallError, LinkError, RendezvousTimeout
from farcall.runtime.membership.store_probe import StoreSearch
from farcall.runtime.membership.stores import bounded
from farcall.runtime.threads.executor import Executor
from farcall.runtime.threads.function_queue import FunctionQueue, max_threads_of
from farcall.runtime.threads.places import Places
from farcall.testing.cluster import TRANSPORTS, Transport, acting_as
from farcall.threads import FarcallThread
from farcall.transport.brief_threads import BriefThreads
from farcall.transport.uninterrupted import in_a_thread


@pytest.fixture
def none_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Has the system give no thread whose name matches. Gives the names of those, as they come."""

    def forbid(pattern: str) -> list[str]:
        refused: list[str] = []
        usual = FarcallThread.start

        def start(thread: FarcallThread) -> None:
            if re.match(pattern, thread.name):
                refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            usual(thread)

        monkeypatch.setattr(FarcallThread, "start", start)
        return refused

    return forbid


def test_all_threads_are_of_the_kind_that_may_be_refused() -> None:
    package = Path(farcall.__file__).parent
    besides = {"threads.py", *("testing", "demos", "cli")}
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] not in besides:
            found = re.search(r"\bThread\(|ThreadPoolExecutor|threading\.Timer", path.read_text())
            assert found is None, f"{path}: {found and found[0]}"


@pytest.mark.parametrize("kind", ["handshake", "dial"])
@pytest.mark.parametrize("transport", [one for one in TRANSPORTS if one != "inproc"])
def test_links_are_made_without_threads_of_their_own(
    none_for: Callable[[str], list[str]], transport: Transport, kind: str
) -> None:
    refused = none_for(f"farcall-{kind}-")
    with patient_cluster(3, transport=transport) as agents, acting_as(agents[0]):
        for to in ("w1", "w2"):
            assert rpc.rpc_sync(to, abs, args=(-1,), timeout=PATIENCE) == 1
    assert refused


def test_an_endpoint_that_can_not_accept_says_so(none_for: Callable[[str], list[str]]) -> None:
    none_for("farcall-accept-")
    with (
        check_no_threads_left(),
        pytest.raises(LinkError, match=r"no thread to accept connections: can't start new thread"),
    ):
        patient_cluster(2, transport="socket").__enter__()


@pytest.mark.parametrize("direction", ["in", "out"])
def test_channels_of_a_process_group(
    none_for: Callable[[str], list[str]], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = none_for(rf"farcall .* {direction}$")
    if direction == "in":
        with pytest.raises(LinkError, match="no thread for the connection to rank 1: can't start"):
            patient_cluster(2, transport="process_group").__enter__()
        return
    with patient_cluster(2, transport="process_group") as agents, acting_as(agents[0]):
        with pytest.raises((rpc.RpcTimeout, rpc.PeerLost)):
            rpc.rpc_sync("w1", abs, args=(-1,), timeout=0.5)
        assert refused
        monkeypatch.undo()
        assert rpc.rpc_sync("w1", abs, args=(-1,), timeout=PATIENCE) == 1


def test_a_store_says_that_there_is_no_thread(none_for: Callable[[str], list[str]]) -> None:
    none_for("farcall store")
    with pytest.raises(FarcallError, match="no thread for an operation of torch's store: can't"):
        bounded(lambda: 1, PATIENCE, TimeoutError())


def test_the_search_for_a_store_says_that_there_is_no_thread(
    none_for: Callable[[str], list[str]],
) -> None:
    refused = none_for("farcall resolver")
    with pytest.raises(RendezvousTimeout, match=r"no thread for it: can't start new thread"):
        StoreSearch("localhost", 1, 0.2, confined=True).find("")
    assert len(refused) > 1  # it tried again


def test_work_that_shall_not_be_interrupted_runs_in_the_caller(
    none_for: Callable[[str], list[str]],
) -> None:
    assert in_a_thread(threading.get_ident, "x") != threading.get_ident()
    none_for("x")
    assert in_a_thread(threading.get_ident, "x") == threading.get_ident()


class TestBriefThreads:
    def test_each_work_has_a_thread_up_to_a_number(self) -> None:
        threads, before = BriefThreads("brief", 2), set(threading.enumerate())
        go_on = threading.Event()
        done: list[int] = []

        def work(number: int) -> None:
            assert go_on.wait(PATIENCE)
            done.append(number)

        for number in range(5):
            assert threads.run(lambda number=number: work(number))  # type: ignore[misc]
        assert len(threads_since(before, "brief_")) == 2
        go_on.set()
        threads.close()
        assert sorted(done) == list(range(5))
        assert not threads.run(lambda: done.append(5))

    def test_the_end_leaves_behind_threads_that_do_not_end(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        threads = BriefThreads("brief", 2)
        go_on, ended = threading.Event(), threading.Event()
        threads.run(lambda: go_on.wait(PATIENCE) and ended.set())  # type: ignore[func-returns-value]
        threads.close(0.01)
        assert "left behind after 0.01 s, still at work: brief_1" in caplog.text
        caplog.clear()
        threads.close(0.0)
        assert caplog.text == ""
        go_on.set()
        threads.close(PATIENCE)
        assert ended.is_set()
        assert caplog.text == ""

    def test_without_a_thread_another_does_it_or_the_caller(
        self, none_for: Callable[[str], list[str]]
    ) -> None:
        threads = BriefThreads("brief", 5)
        has_begun, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            has_begun.set()
            assert go_on.wait(PATIENCE)

        done: list[Any] = []
        threads.run(wait)
        assert has_begun.wait(PATIENCE)
        none_for("brief_")
        threads.run(lambda: done.append(threading.current_thread().name))
        assert done == []
        go_on.set()
        threads.close()
        assert done == ["brief_1"]
        threads = BriefThreads("brief", 5)
        assert not threads.run(lambda: done.append(1), needed=False)
        assert threads.run(lambda: done.append(threading.current_thread()))
        assert done[1:] == [threading.current_thread()]
        assert threads.run(lambda: 1 / 0)  # logged

    def test_work_that_comes_whenever_a_thread_lets_go_of_the_lock_is_done(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = BriefThreads("brief", 1)
        done: SimpleQueue[int] = SimpleQueue()
        lock, left = threads._lock, list(range(50))

        class Giving:
            """A lock whose holder gives more work, in a thread of `threads`, after each release."""

            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()
                if left and threading.current_thread().name.startswith("brief_"):
                    number = left.pop()
                    threads.run(lambda: done.put(number))

        monkeypatch.setattr(threads, "_lock", Giving())
        threads.run(lambda: done.put(50))
        assert {done.get(timeout=PATIENCE) for _ in range(51)} == set(range(51))
        threads.close()


class TestFunctionQueue:
    """QUEUE-1 and QUEUE-2."""

    @pytest.mark.parametrize(("most", "running"), [(2, 16), (3, 1), (8, 2), (256, 16), (1000, 500)])
    def test_each_depth_has_a_thread_more_and_one_always_leads(
        self, most: int, running: int
    ) -> None:
        queue = FunctionQueue(most, running)
        limits = [queue.limit(depth) for depth in range(1, most + 5)]
        assert limits[0] >= 1
        assert limits[-1] == most - 1
        steps = [later - earlier for earlier, later in pairwise(limits)]
        assert set(steps) <= {0, 1}
        assert steps == sorted(steps, reverse=True)

    @pytest.mark.parametrize("seed", range(20))
    def test_functions_of_any_chains_never_block_each_other(self, seed: int) -> None:
        """Serve chains of calls: as long as one waits, another one goes on."""
        chance = random.Random(seed)
        most = chance.randint(4, 20)
        workers = [FunctionQueue(most, chance.randint(1, 4)) for _ in range(chance.randint(1, 3))]
        depth = min(most - worker.plenty for worker in workers)  # up to here the limits grow
        taken: list[list[int]] = [[] for _ in workers]
        places = [[chance.randrange(len(workers)) for _ in range(depth)] for _ in range(50)]
        ended = 0
        ready: list[tuple[int, list[int]]] = []

        def call(level: int, place: list[int]) -> None:
            workers[place[level]].push(lambda: ready.append((level, place)), level + 1)

        for place in places:
            call(0, place)
        while ended < len(places):
            for queue, depths in zip(workers, taken, strict=True):
                while found := queue.pop(depths) if queue.size else None:
                    found[0]()
                    depths.append(found[1])
                    assert len(depths) < most
            assert ready, "all wait for each other"
            level, place = ready.pop(chance.randrange(len(ready)))
            if level + 1 < depth:
                call(level + 1, place)  # and waits
                continue
            for above in range(depth):  # the deepest ends, and so do those that wait for it
                taken[place[above]].remove(above + 1)
            ended += 1

    @pytest.mark.parametrize("seed", range(20))
    def test_callers_take_turns_and_keep_their_order(self, seed: int) -> None:  # QUEUE-3
        chance = random.Random(seed)
        queue = FunctionQueue(64, 4)
        waiting: dict[int | None, list[int]] = {}
        ran: list[int] = []
        since: Counter[int | None] = (
            Counter()
        )  # how many of others ran since this caller's last turn
        for number in range(500):
            caller = chance.choice([None, None, None, None, 1, 2, 3])  # None for own work
            if chance.random() < 0.6:
                queue.push(partial(ran.append, number), 1, caller)
                waiting.setdefault(caller, []).append(number)
            besides = {caller} if chance.random() < 0.3 else set()
            assert queue.has_turn(besides) == bool(set(waiting) - besides)
            if (found := queue.pop([], besides=besides)) is None:
                assert not set(waiting) - besides
                continue
            function, _, whose = found
            function()
            assert whose not in besides
            assert ran[-1] == waiting[whose].pop(0)
            for other in list(waiting):
                since[other] = 0 if other == whose or other in besides else since[other] + 1
                assert since[other] < 8
            if not waiting[whose]:
                del waiting[whose]
        assert queue.size == sum(map(len, waiting.values()))

    @pytest.mark.parametrize(("running", "guests"), [(1, 0), (2, 1), (4, 1), (16, 4), (500, 125)])
    def test_there_are_places_for_callers_that_would_have_none(
        self, running: int, guests: int
    ) -> None:  # QUEUE-4
        places = Places(running, FunctionQueue(4096, running).guests)
        for number in range(running):
            assert places.may_run("flood")
            assert not places.refused()
            places.running[number] = 1, "flood"
        assert not places.may_run("flood")
        for number in range(guests):
            assert places.is_any_free
            assert places.may_run(number)
            places.running[running + number] = 1, number
            assert not places.may_run(number)
            assert places.refused() == {"flood", *range(number + 1)}
        assert not places.is_any_free
        assert not places.may_run("another")
        places.away[0] = places.running.pop(0)  # its function waits
        assert len(places.taken()) == running + guests
        assert places.is_any_free

    def test_the_default_grows_with_the_functions_that_run(self) -> None:
        assert max_threads_of(None, 16) == 256
        assert max_threads_of(None, 500) == 1000
        assert max_threads_of(7, 500) == 7

    def test_it_says_when_it_held_a_function_back(self) -> None:
        queue = FunctionQueue(2, 1)
        queue.push(lambda: None, 1)
        assert queue.pop([1]) is None
        assert queue.held_at <= time.monotonic()
        assert queue.held_at > 0.0
        assert queue.pop([]) is not None
        assert queue.size == 0


def test_a_leader_that_runs_callbacks_does_not_count_as_leading() -> None:
    """Count it out: callbacks may wait, and then the last thread has to lead."""
    executor = Executor("w0", Mock(), Mock(), 2, max_threads=2)
    executor._leader = threading.get_ident()
    executor._threads.update({FarcallThread(print, "leads"), FarcallThread(print, "rests")})
    executor._resting.append(threading.Lock())
    executor._resting[0].acquire()
    with executor._lock:
        assert executor._is_led()
    assert executor.may_wait_here(2)
    with executor._lock:
        assert executor._followers.wake()
        executor._followers.waking -= 1  # the thread looks for work
        assert not executor._is_led()
        executor._pass_lead()
        executor._leader = threading.get_ident()
        assert executor._is_led()
