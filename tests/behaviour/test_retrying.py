"""`retry=`: calls that may be repeated are made again when a worker is lost; never silently."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from behaviour.helpers import PATIENCE
from behaviour.open_group import OpenGroup
from farcall import rpc
from farcall.errors import UnknownWorker
from farcall.runtime.agent import Agent
from farcall.runtime.calls import retrying
from farcall.runtime.calls.retrying import Attempts, RepeatedCall
from farcall.testing.cluster import acting_as

_calls: list[str] = []
KINDS = ["sync", "async"]


def call(kind: str, *args: Any, **kwargs: Any) -> Any:
    if kind == "sync":
        return rpc.rpc_sync(*args, **kwargs)
    return rpc.rpc_async(*args, **kwargs).wait()


def lose_twice() -> str:
    """Fail the first two times, as if some worker had been lost."""
    _calls.append("lost")
    if len(_calls) < 3:
        raise rpc.PeerLost("w9", "it died")
    return "done"


def fail() -> None:
    _calls.append("failed")
    raise ValueError("no")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _calls.clear()
    yield
    _calls.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_lost_call_is_made_again_and_each_repetition_is_logged(
    pair: list[Agent], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert call(kind, "w1", lose_twice, retry=rpc.Retry(times=2, backoff=0.01)) == "done"
    texts = [record.getMessage() for record in caplog.records if "again in" in record.getMessage()]
    assert len(texts) == 2
    assert "lose_twice" in texts[0]
    assert "attempt 2 of 3" in texts[0]
    assert "attempt 3 of 3" in texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_last_error_says_how_many_attempts_there_were(pair: list[Agent], kind: str) -> None:
    with pytest.raises(rpc.PeerLost, match="the call was made 2 times") as caught:
        call(kind, "w1", lose_twice, retry=1)
    assert caught.value.worker == "w9"
    assert len(_calls) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_without_retry_nothing_is_repeated(pair: list[Agent], kind: str) -> None:
    with pytest.raises(rpc.PeerLost, match="it died"):
        call(kind, "w1", lose_twice)
    assert len(_calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_the_function_is_the_outcome(pair: list[Agent], kind: str) -> None:
    with pytest.raises(ValueError, match="no"):
        call(kind, "w1", fail, retry=5)
    assert len(_calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_all_attempts_are_within_the_deadline(
    pair: list[Agent], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "LONGEST_PAUSE", 2 * PATIENCE)
    retry = rpc.Retry(times=5, backoff=2 * PATIENCE)
    with pytest.raises(rpc.PeerLost):
        call(kind, "w1", lose_twice, timeout=PATIENCE, retry=retry)
    assert len(_calls) == 1  # the pause would have been too long


@pytest.mark.parametrize("kind", KINDS)
def test_worker_that_is_lost_for_good_ends_the_call(pair: list[Agent], kind: str) -> None:
    pair[1].close()
    with pytest.raises(rpc.PeerLost, match=r"'w1'.*the call was made 3 times"):
        call(kind, "w1", abs, args=(-1,), retry=rpc.Retry(2, 0.01))


def test_cancelled_call_is_not_repeated(pair: list[Agent]) -> None:
    future = rpc.rpc_async("w1", lose_twice, retry=rpc.Retry(5, PATIENCE))
    future.cancel()
    with pytest.raises(rpc.Cancelled):
        future.wait()
    assert len(_calls) <= 1


def test_attempt_ends_if_its_call_is_cancelled_while_it_is_made(pair: list[Agent]) -> None:
    attempt: rpc.Future[None] = rpc.Future()
    call = RepeatedCall()

    def make(seconds: float) -> rpc.Future[None]:
        call.cancel()
        return attempt

    call.attempts, call.make = Attempts(pair[0], "it", rpc.Retry(3), None), make
    call.begin()
    assert attempt.cancelled()


@pytest.mark.parametrize("kind", KINDS)
def test_worker_that_is_not_there_yet_is_tried_again_in_an_open_group(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = OpenGroup()
    try:
        w0 = group.join("w0")
        with acting_as(w0):
            with pytest.raises(UnknownWorker, match="the call was made 2 times"):
                call(kind, "w1", abs, args=(-1,), retry=rpc.Retry(1, 0.01))
            joins = threading.Timer(0.2, group.join, ("w1",))
            joins.start()
            retry = rpc.Retry(100, 0.05)
            assert call(kind, "w1", abs, args=(-1,), timeout=PATIENCE, retry=retry) == 1
            joins.join()
    finally:
        group.close()


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_worker_of_a_fixed_group_is_a_mistake(
    pair: list[Agent], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnknownWorker):
        call(kind, "w9", abs, args=(-1,), retry=3)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "3", lambda: rpc.Retry(-1)])
def test_wrong_retry_is_refused(pair: list[Agent], wrong: Any) -> None:
    given: Callable[[], Any] = wrong if callable(wrong) else lambda: wrong
    with pytest.raises((TypeError, ValueError), match="retry"):
        rpc.rpc_sync("w1", abs, args=(-1,), retry=given())
