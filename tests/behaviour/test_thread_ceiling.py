"""The ceiling of threads: a wait keeps a thread, there are only so many, and no call suffers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from patience import PATIENCE

from behaviour.helpers import Box, Gate, by_async, by_remote, by_sync, echo, in_threads
from behaviour.test_nesting import around, ping_pong, to_itself
from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as
from farcall.threads import FarcallThread

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("way", [by_sync, by_async, by_remote])


# The threads that there were when the test began: workers of all tests have the same names, and a
# function of an earlier one may still wait.
earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def only_own_threads() -> None:
    """Count none of the threads that earlier tests have left."""
    earlier.clear()
    earlier.update(threading.enumerate())


def threads_of(worker: str) -> int:
    """Return how many threads serve a worker's calls."""
    own = set(threading.enumerate()) - earlier
    names = [thread.name.rpartition("-")[0] for thread in own]
    return names.count(f"farcall-{worker}")


class Peak:
    """The greatest number of threads of each worker, looked at by its functions."""

    def __init__(self, workers: int) -> None:
        self.of = dict.fromkeys((f"w{rank}" for rank in range(workers)), 0)

    def look(self) -> None:
        for worker, most in self.of.items():
            self.of[worker] = max(most, threads_of(worker))


PEAKS: list[Peak] = []


def nested(depth: int, path: list[int], way: Way) -> int:
    """Calls around the workers of `path`, and looks how many threads there are."""
    PEAKS[-1].look()
    if not depth:
        return 0
    return int(way(path[depth % len(path)], nested, (depth - 1, path, way))) + 1


@pytest.fixture
def peak() -> Peak:
    PEAKS.append(Peak(3))
    return PEAKS[-1]


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the system give each worker only so many threads for calls."""

    def limit(most: int) -> None:
        usual = FarcallThread.start

        def start(thread: FarcallThread) -> None:
            of_worker = re.fullmatch(r"farcall-(w\d+)-\d+", thread.name)
            if of_worker and threads_of(of_worker[1]) >= most:
                raise RuntimeError("can't start new thread")
            usual(thread)

        monkeypatch.setattr(FarcallThread, "start", start)

    return limit


def many(number: int, depth: int, path: list[int], way: Way) -> None:
    futures = [
        rpc.rpc_async(path[-1], nested, args=(depth, path, way), timeout=PATIENCE)
        for _ in range(number)
    ]
    assert [future.wait() for future in futures] == [depth] * number


# Many calls at once.


def test_two_thousand_nested_calls_keep_to_the_ceiling(
    start: Callable[..., list[Agent]], peak: Peak
) -> None:
    start(2, num_worker_threads=2)
    many(2000, 1, [0, 1], by_sync)
    assert max(peak.of.values()) <= 256


@each_way
@pytest.mark.parametrize(
    ("ceiling", "depth", "path"),
    [
        (2, 0, [1]),
        (3, 1, [1]),
        (4, 2, [1]),  # to itself
        (4, 3, [0, 1]),
        (8, 5, [0, 1]),
        (8, 6, [0, 1, 2]),
        (12, 7, [1]),
    ],
)
def test_nested_calls_below_the_ceiling_never_block_each_other(
    start: Callable[..., list[Agent]],
    peak: Peak,
    ceiling: int,
    depth: int,
    path: list[int],
    way: Way,
) -> None:
    start(3, num_worker_threads=2, max_threads=ceiling)
    many(40, depth, path, way)
    # With `remote` the caller of a value may wait in a callback, beside the functions.
    assert max(peak.of.values()) <= ceiling


@pytest.mark.parametrize("ceiling", [4, 9, 20])
def test_one_chain_may_have_all_threads_but_the_leader(
    start: Callable[..., list[Agent]], ceiling: int
) -> None:
    start(2, num_worker_threads=1, max_threads=ceiling)
    assert (
        rpc.rpc_sync("w1", to_itself, args=(ceiling - 2, by_sync), timeout=PATIENCE) == ceiling - 2
    )
    path = rpc.rpc_sync("w1", ping_pong, args=(2 * ceiling - 4, by_async, []), timeout=PATIENCE)
    assert len(path) == 2 * ceiling - 3


@each_way
def test_a_chain_beyond_the_ceiling_ends_and_says_why(
    start: Callable[..., list[Agent]], way: Way
) -> None:
    # With `remote` each function waits for the default timeout.
    start(2, num_worker_threads=1, max_threads=4, rpc_timeout=2.0)
    chains = {to: rpc.rpc_async(to, to_itself, args=(20, way), timeout=2.0) for to in ("w0", "w1")}
    for to, chain in chains.items():
        with pytest.raises(rpc.RpcTimeout, match=rf"worker '{to}': its option max_threads \(4\)"):
            chain.wait()
    assert rpc.rpc_sync("w1", echo, args=(1,), timeout=PATIENCE) == 1


def test_no_timeout_speaks_of_threads_when_there_are_enough(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    start(2, num_worker_threads=1, max_threads=4)
    with pytest.raises(rpc.RpcTimeout) as caught:
        rpc.rpc_sync("w1", gate_wait, args=(gate,), timeout=0.2)
    assert "queue" not in str(caught.value)


def gate_wait(gate: Gate) -> int:
    return gate.wait()


# Work that goes on when all threads wait.


def test_answers_deadlines_and_messages_are_served_when_all_threads_wait(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    agents = start(3, num_worker_threads=2, max_threads=6)
    waiting = [rpc.rpc_async("w1", wait_there, args=("w2", gate)) for _ in range(20)]
    gate.wait_for_arrivals(2)
    with acting_as(agents[1]):
        assert rpc.rpc_async("w0", echo, args=(1,)).wait() == 1
        assert rpc.remote("w0", echo, args=(2,)).to_here() == 2
        assert rpc.rpc_async("w0", echo, args=(3,)).then(lambda f: f.wait() + 1).wait() == 4
        late = rpc.rpc_async("w2", wait_there, args=("w2", gate), timeout=0.1)
        with pytest.raises(rpc.RpcTimeout):
            late.wait()
    gate.open()
    assert len([future.wait() for future in waiting]) == 20


def wait_there(to: str, gate: Gate) -> int:
    return int(rpc.rpc_async(to, gate_wait, args=(gate,)).wait())


@pytest.mark.parametrize("of", ["ceiling", "system"])
def test_callbacks_that_wait_keep_to_the_ceiling_too(
    start: Callable[..., list[Agent]], few_threads: Callable[[int], None], peak: Peak, of: str
) -> None:
    if of == "system":
        few_threads(5)
    start(2, num_worker_threads=2, max_threads=8 if of == "ceiling" else None)
    # A callback counts as a level. A system that gives few threads has them for two levels.
    depth = 2 if of == "ceiling" else 0
    for again in (by_sync, by_async):
        futures = [
            rpc.rpc_async("w1", nested, args=(depth, [0, 1], by_sync), timeout=PATIENCE).then(
                lambda f: f.wait() + again("w1", nested, (depth, [1, 0], by_sync))  # noqa: B023
            )
            for _ in range(100)
        ]
        assert [future.wait() for future in futures] == [2 * depth] * 100
        assert max(peak.of.values()) <= 9  # one leads in the place of a callback that waits


def test_callbacks_that_wait_for_a_thread_end_with_the_agent(
    start: Callable[..., list[Agent]], gate: Gate
) -> None:
    agents = start(2, num_worker_threads=2, max_threads=2)
    begin = Gate()  # else a callback might be added to a future that is done, and run here
    futures = [
        rpc.rpc_async("w1", gate_wait, args=(begin,)).then(
            lambda _: rpc.rpc_sync("w1", gate_wait, args=(gate,))
        )
        for _ in range(10)
    ]
    begin.open()
    gate.wait_for_arrivals(1)
    with in_threads(lambda: agents[0].close(patience=0.1)):
        for future in futures:
            with pytest.raises((rpc.Cancelled, rpc.NotInitialized)):
                future.wait()


# A system that gives no threads.


@each_way
@pytest.mark.parametrize("most", [3, 4, 10])
def test_a_system_without_threads_is_no_error_of_any_call(
    start: Callable[..., list[Agent]],
    few_threads: Callable[[int], None],
    way: Way,
    most: int,
) -> None:
    few_threads(most)
    agents = start(3, num_worker_threads=16)
    PEAKS.append(Peak(0))
    many(300, 1, [0, 1], way)
    many(300, 2, [1, 0], way)
    assert rpc.rpc_sync("w1", around, args=(2, 3), timeout=PATIENCE) == 2
    for agent in agents:
        agent.shutdown(graceful=False)


def test_calls_go_on_when_the_system_has_threads_again(
    start: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    start(2, num_worker_threads=16)
    with monkeypatch.context() as patch:
        patch.setattr(FarcallThread, "start", refuse)
        waiting = [rpc.rpc_async("w1", gate_wait, args=(gate,)) for _ in range(8)]
        gate.wait_for_arrivals(1)
        assert gate.arrived < 8
    gate.wait_for_arrivals(8)  # nothing has ended meanwhile
    gate.open()
    assert sorted(future.wait() for future in waiting) == list(range(8))


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_worker_that_gets_no_threads_says_so_and_leaves_nothing(
    start: Callable[..., list[Agent]], few_threads: Callable[[int], None]
) -> None:
    few_threads(2)
    with pytest.raises(rpc.FarcallError, match=r"threads of worker 'w0' .*: can't start new thr"):
        start(2)
    box = Box()
    for thread in threading.enumerate():
        if thread.name.startswith(("farcall-w0", "farcall-watch-w0")):
            box.put(thread)
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in box.things)
