"""Both kinds of watch notice the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farcall.transport.base import Notice, Watch
from farcall.transport.watch import PollingWatch


def native_watch() -> Watch:
    native = pytest.importorskip("farcall._native", reason="the C++ part is not built")
    made: Watch = native.Watch()
    return made


@pytest.fixture(params=[PollingWatch, native_watch], ids=["python", "native"])
def watch(request: pytest.FixtureRequest) -> Iterator[Watch]:
    make: Callable[[], Watch] = request.param
    made = make()
    yield made
    made.stop()


def test_a_thread_that_is_busy_for_long_is_overdue(watch: Watch) -> None:
    assert not watch.is_overdue()
    for _ in range(3):
        watch.begin()
        watch.begin()
        assert watch.wait() == Notice.OVERDUE
        assert watch.is_overdue()
        watch.end()
        assert not watch.is_overdue()


def test_queue_that_does_not_get_on_starves(watch: Watch) -> None:
    watch.set_queue(True)
    assert watch.wait() == Notice.STARVING
    assert watch.wait() == Notice.STARVING
    watch.begin()
    assert watch.wait() == Notice.OVERDUE


def test_stop_ends_every_wait(watch: Watch) -> None:
    waiting = threading.Thread(target=watch.wait)
    waiting.start()
    watch.stop()
    waiting.join()
    watch.begin()
    assert watch.wait() == Notice.STOPPED


def switches(thread: threading.Thread) -> str:
    """Return the number of times that a thread has slept so far."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return next(line for line in status.splitlines() if line.startswith("voluntary_"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("what", ["busy", "queue", "stop"])
def test_watch_sleeps_when_nothing_happens_until_something_does(watch: Watch, what: str) -> None:
    noticed: list[int] = []
    thread = threading.Thread(target=lambda: noticed.append(watch.wait()))
    thread.start()
    # Its longest pause between two looks is 4 ms: a thread that did not wake up in 100 of them
    # sleeps.
    before = ""
    while before != (before := switches(thread)):
        time.sleep(0.4)
    assert not noticed
    if what == "busy":
        watch.begin()
    elif what == "queue":
        watch.set_queue(True)
    else:
        watch.stop()
    thread.join()
    assert noticed == [{"busy": Notice.OVERDUE, "queue": Notice.STARVING}.get(what, Notice.STOPPED)]
