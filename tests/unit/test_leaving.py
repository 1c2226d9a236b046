"""Whom a shutdown tells, and whose silence it names."""

from __future__ import annotations

import math
import time

import pytest

from farcall.runtime.leaving import Leaver
from farcall.wire.messages import Dismiss, Drain, Drained, Message

ME, SILENT, READY = 10, 11, 12
MEMBERS = [(0, ME), (1, SILENT), (2, READY)]


class Control:
    """Delivers what is for this worker, and answers for the one that is ready, at once."""

    def __init__(self) -> None:
        self.leaver = Leaver(ME, MEMBERS, self)  # type: ignore[arg-type]
        self.told: list[tuple[int, type[Message]]] = []

    def post(self, to: int, message: Message, call_id: int) -> None:
        self.told.append((to, type(message)))
        if to == ME:
            self.leaver.on_message(ME, message)  # type: ignore[arg-type]
        elif to == READY and type(message) is Drain:
            self.leaver.on_message(to, Drained(message.round, 0))

    def watch(self, incarnation: int, deadline: float) -> None:
        pass


@pytest.fixture
def control() -> Control:
    return Control()


def test_one_that_is_silent_is_named(control: Control) -> None:
    assert not control.leaver.leave(time.monotonic() + 0.01)
    assert control.told.count((SILENT, Drain)) == 1
    assert control.told.count((READY, Drain)) == 1
    assert control.leaver.missing == [SILENT]


def test_one_that_is_lost_is_not_waited_for(control: Control) -> None:
    control.leaver.lost(SILENT)
    assert control.leaver.leave(math.inf)
    assert control.told[-1] == (READY, Dismiss)
    assert SILENT not in [to for to, _ in control.told]
