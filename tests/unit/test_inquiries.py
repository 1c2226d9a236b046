"""Work that waits until the store has said where a worker is."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from patience import PATIENCE

from farcall.errors import Cancelled, RpcTimeout, UnknownWorker
from farcall.runtime.membership.inquiries import Inquiries

Outcome = tuple[str, object]


class Looking:
    """Looks at what the test says, when the test says it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.said: SimpleQueue[object] = SimpleQueue()

    def look(self, _: float) -> object:
        self.begun.release()
        said = self.said.get(timeout=PATIENCE)
        if isinstance(said, Exception):
            raise said
        return said

    def wait_until_it_looks(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE)


@pytest.fixture
def inquiries() -> Iterator[Inquiries]:
    inquiries = Inquiries("me")
    yield inquiries
    inquiries.close(Cancelled("the test is over"))


@pytest.fixture
def outcomes() -> SimpleQueue[Outcome]:
    return SimpleQueue()


def noting(outcomes: SimpleQueue[Outcome], who: str) -> Callable[[object, object], None]:
    return lambda error, found: outcomes.put((who, error or found))


def test_no_listener_is_told_of_changes_before_it_asked(
    inquiries: Inquiries, outcomes: SimpleQueue[Outcome]
) -> None:
    looking, none = Looking(), UnknownWorker("there is none")
    inquiries.ask("w1", looking.look, math.inf, noting(outcomes, "first"))
    looking.wait_until_it_looks()
    inquiries.ask("w1", looking.look, math.inf, noting(outcomes, "second"))
    looking.said.put(none)
    assert outcomes.get(timeout=PATIENCE) == ("first", none)
    looking.wait_until_it_looks()
    inquiries.ask("w1", looking.look, math.inf, noting(outcomes, "third"))
    looking.said.put(5)  # one answer counts for all
    assert outcomes.get(timeout=PATIENCE) == ("second", 5)
    assert outcomes.get(timeout=PATIENCE) == ("third", 5)


def test_a_caller_that_waits_behind_others_goes_on_after_them(
    inquiries: Inquiries, outcomes: SimpleQueue[Outcome]
) -> None:
    looking = Looking()
    inquiries.ask("w1", looking.look, math.inf, noting(outcomes, "first"))
    looking.said.put(UnknownWorker("there is none"))
    looking.said.put(5)
    inquiries.wait_behind("w1", looking.look, math.inf)
    assert outcomes.get_nowait()[0] == "first"


def test_a_caller_that_waits_behind_others_has_a_deadline(inquiries: Inquiries) -> None:
    looking = Looking()
    with pytest.raises(TimeoutError):
        inquiries.wait_behind("w1", looking.look, 0.0)
    looking.said.put(RpcTimeout("not in time"))
