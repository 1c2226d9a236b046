"""How the time of a shutdown is shared among those that it has to reach."""

from __future__ import annotations

import math
from typing import Any

import pytest

import farcall.runtime.leaving as module
from farcall.runtime.leaving import Leaver
from farcall.wire.messages import Dismiss, Drain, Drained, Message

ME, SILENT, READY = 10, 11, 12
MEMBERS = [(0, ME), (1, SILENT), (2, READY)]


class Control:
    """Time passes only while it waits for the silent one; what is for me arrives at once."""

    def __init__(self) -> None:
        self.now = 100.0
        self.leaver: Leaver | None = None
        self.given: list[tuple[int, type[Message], float]] = []

    def monotonic(self) -> float:
        return self.now

    def post(self, to: int, message: Message, call_id: int, deadline: float) -> None:
        assert self.leaver is not None
        self.given.append((to, type(message), deadline - self.now))
        if to == SILENT and deadline < math.inf:
            self.now = max(self.now, deadline)
        elif to == ME:
            self.leaver.on_message(ME, message)  # type: ignore[arg-type]
        elif type(message) is Drain:
            self.leaver.on_message(to, Drained(message.round, 0))

    def watch(self, incarnation: int, deadline: float) -> None:
        pass


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Control:
    control = Control()
    monkeypatch.setattr(module, "time", control)
    control.leaver = Leaver(ME, MEMBERS, control)  # type: ignore[arg-type]
    return control


def given_to(control: Control, worker: int) -> list[Any]:
    return [(kind, seconds) for to, kind, seconds in control.given if to == worker]


def test_a_silent_worker_does_not_use_up_the_time_of_the_others(control: Control) -> None:
    leaver = control.leaver
    assert leaver is not None
    assert not leaver.leave(control.now + 0.9)
    assert given_to(control, SILENT) == [(Drain, pytest.approx(0.3))]
    assert given_to(control, READY) == [(Drain, pytest.approx(0.3))]
    assert leaver.missing == [SILENT]


def test_without_a_timeout_nobody_is_given_up(control: Control) -> None:
    leaver = control.leaver
    assert leaver is not None
    leaver.lost(SILENT)
    assert leaver.leave(math.inf)
    assert {seconds for _, _, seconds in control.given} == {math.inf}
    assert given_to(control, READY)[-1] == (Dismiss, math.inf)
