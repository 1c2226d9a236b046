"""A lost worker is looked for until it is there, or is known to be gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from behaviour.helpers import wait_until
from threads_left import check_no_threads_left, threads_since

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.ids import Worker
from farcall.protocol.worker import Calls
from farcall.runtime.membership import searching
from farcall.runtime.membership.peers import Peer
from farcall.runtime.membership.searching import Search
from farcall.transport.base import NotSent, Silent

PEER = Peer(Worker("other", 1, 2), True, Calls())


class Reach:
    """Ends each attempt as the test says."""

    def __init__(self) -> None:
        self.completion: list[Exception | None] = []
        self.attempts = 0

    def __call__(self, peer: Peer) -> None:
        assert peer is PEER
        self.attempts += 1
        outcome = self.completion.pop(0)
        if outcome is not None:
            raise outcome


@pytest.fixture
def reach() -> Reach:
    return Reach()


@pytest.fixture
def search(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> Iterator[Search]:
    monkeypatch.setattr(searching, "FIRST_SECONDS", 0.0)
    search = Search("me", reach)
    yield search
    search.close()


@pytest.mark.parametrize("last", [None, LinkError("no process listens there")])
def test_silence_proves_nothing(reach: Reach, search: Search, last: Exception | None) -> None:
    reach.completion = [NotSent("in time"), Silent("for 30 s"), last]
    search.begin(PEER, times_met=0)
    wait_until(lambda: reach.attempts == 3 and not search._is_at_work)
    reach.completion = [None]
    search.begin(PEER, times_met=0)
    wait_until(lambda: reach.attempts == 4 and not search._is_at_work)


@pytest.mark.parametrize(
    "error",
    [AuthenticationFailed("our certificate has expired"), BadFrame("TLS ended by 'bad record'")],
    ids=["a credential may be renewed", "a path may alter a handshake"],
)
def test_failed_handshake_proves_nothing(reach: Reach, search: Search, error: LinkError) -> None:
    reach.completion = [error, None]
    search.begin(PEER, times_met=0)
    wait_until(lambda: reach.attempts == 2 and not search._is_at_work)


@pytest.mark.parametrize(("times_met", "seconds"), [(0, 1.0), (3, 8.0), (9, 30.0)])
def test_those_that_part_again_and_again_are_looked_for_later(
    monkeypatch: pytest.MonkeyPatch, times_met: int, seconds: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Search, "_put", lambda _, __, wait: waits.append(wait))
    search = Search("me", pytest.fail)
    search.begin(PEER, times_met=times_met)
    assert waits == [seconds]
    search.close()


def test_an_end_ends_the_wait(reach: Reach) -> None:
    search, before = Search("me", reach), set(threading.enumerate())
    with check_no_threads_left("farcall-search-me"):
        search.begin(PEER, times_met=9)
        (thread,) = threads_since(before, "farcall-search-me")
        search.close()
    search.begin(PEER, times_met=0)
    assert threads_since({*before, thread}, "farcall-search-me") == []
    assert reach.attempts == 0
