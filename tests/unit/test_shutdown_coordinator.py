"""The workers that a shutdown tells, and those whose silence it names."""

from __future__ import annotations

import math
import threading
import time

import pytest
from patience import PATIENCE

from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.wire.messages import Dismiss, Drain, Drained, Message

ME, SILENT, READY = 10, 11, 12
MEMBERS = [(0, ME), (1, SILENT), (2, READY)]


class Control:
    """Messages to this worker are delivered at once, and the one that is ready answers at once."""

    def __init__(self) -> None:
        self.coordinator = ShutdownCoordinator(ME, MEMBERS, self, 0.05)  # type: ignore[arg-type]
        self.questions: list[int] = []
        self.there: set[int] = set()
        self.asked = threading.Event()
        self.told: list[tuple[int, type[Message]]] = []

    def post(self, to: int, message: Message, call_id: int) -> None:
        self.told.append((to, type(message)))
        if to == ME:
            self.coordinator.on_message(ME, message)  # type: ignore[arg-type]
        elif to == READY and type(message) is Drain:
            self.coordinator.on_message(to, Drained(message.round, 0))

    def watch(self, incarnation: int, deadline: float) -> None:
        pass

    def awaited(self) -> set[int]:
        return set()

    def answers(self, incarnation: int, until: float) -> bool:
        self.questions.append(incarnation)
        if len(self.questions) == 20:
            self.asked.set()
        if incarnation not in self.there:
            threading.Event().wait(until - time.monotonic())
        return incarnation in self.there

    def give_up(self, incarnation: int, cause: str) -> None:
        assert "has not answered" in cause
        self.coordinator.on_peer_lost(incarnation)


@pytest.fixture
def control() -> Control:
    return Control()


def test_one_that_is_silent_is_named(control: Control) -> None:
    assert not control.coordinator.leave(time.monotonic() + 0.01)
    assert control.told.count((SILENT, Drain)) == 1
    assert control.told.count((READY, Drain)) == 1
    assert control.coordinator.missing == [SILENT]


def test_one_that_is_lost_is_not_waited_for(control: Control) -> None:
    control.coordinator.on_peer_lost(SILENT)
    assert control.coordinator.leave(math.inf)
    assert control.told[-1] == (READY, Dismiss)
    assert SILENT not in [to for to, _ in control.told]


def test_one_whose_process_is_silent_is_given_up(control: Control) -> None:  # DEP-4
    assert control.coordinator.leave(math.inf)
    assert set(control.questions) == {SILENT}
    assert control.told[-1] == (READY, Dismiss)


def test_one_whose_process_answers_is_waited_for(control: Control) -> None:  # DEP-3
    control.there.add(SILENT)
    leaving = threading.Thread(target=lambda: control.coordinator.leave(math.inf))
    leaving.start()
    assert control.asked.wait(PATIENCE)
    assert control.coordinator.missing == [SILENT]
    control.coordinator.on_peer_lost(SILENT)
    leaving.join(PATIENCE)
    assert not leaving.is_alive()
