"""The machine of a supervision, by hand: its start (SUP-7), and the rows of its table."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.protocol.knowledge import Knowledge
from farcall.protocol.standing import SupervisionAnswer, SupervisionState
from farcall.protocol.succession import Editions, KeptSnapshots
from farcall.protocol.supervision import Strategy, Target
from farcall.protocol.supervision_instructions import (
    Adopt,
    After,
    Ask,
    AskState,
    DropObjects,
    Failed,
    Hear,
    MakeChild,
    Present,
    Started,
    SupervisionPlan,
    TakesOver,
    TellKilled,
)

KEY = 7
PLAN = SupervisionPlan(None, [Target("w0", "")], [0.0], Strategy.ONE, 3, 60.0, 0.0)
PASSES = Failed(OSError("it was lost"), may_pass=True)
STAYS = Failed(LookupError("it has no such module"), may_pass=False)


def worker(number: int, meeting: int | None = None) -> Present:
    return Present(f"w{number}", number, "", number, number if meeting is None else meeting)


class Around:
    """The surroundings of a worker: others, and references that are strings, all of them usable."""

    def __init__(self, me: int, others: list[Present]) -> None:
        self.me = worker(me)
        self.there = others

    def now(self) -> float:
        return 0.0

    def others(self) -> list[Present]:
        return self.there

    def is_usable(self, rref: Any) -> bool:
        return True

    def may_come(self, name: str) -> bool:
        return False


class Driver:
    """Carries out instructions: it keeps the questions, and waits for nothing that has no delay."""

    def __init__(self, me: int, *others: Present, state: SupervisionState | None = None) -> None:
        self.around = Around(me, list(others))
        first = SupervisionState.first(KEY, ("it",), worker(0).keeper, 0)
        self.machine = Knowledge(state or first, self.around, KeptSnapshots(), Editions())
        self.asked: list[Ask] = []
        self.waits: list[After] = []
        self.others: list[Any] = []  # instructions

    def carry_out(self) -> None:
        while to_do := self.machine.take():
            for one in to_do:
                match one:
                    case Ask():
                        self.asked.append(one)
                    case After(0.0, act):
                        act()
                    case After():
                        self.waits.append(one)
                    case _:
                        self.others.append(one)

    def begin(self) -> None:
        self.machine.begin(PLAN)
        self.carry_out()
        (make,) = (one.question for one in self.asked if isinstance(one.question, MakeChild))
        assert self.machine.make(make.child, make.edition, "an object", make.state)
        self.answer(MakeChild, "a reference")

    def answer(self, kind: type, answer: Any) -> list[str]:
        """Answer all open questions of a kind; return which workers were asked."""
        found = [one for one in self.asked if isinstance(one.question, kind)]
        self.asked = [one for one in self.asked if one not in found]
        for one in found:
            if one.done is not None:
                one.done(answer)
        self.carry_out()
        return [one.to for one in found]

    def wait(self) -> None:
        """Let all that waits be due."""
        waits, self.waits = self.waits, []
        for one in waits:
            one.act()
        self.carry_out()

    @property
    def has_started(self) -> bool:
        return Started() in self.others


def test_supervisor_that_is_alone_starts() -> None:
    driver = Driver(0)
    driver.begin()
    assert driver.has_started


def test_supervisor_starts_when_a_keeper_knows_that_all_run() -> None:
    driver = Driver(0, worker(1))
    driver.begin()
    driver.answer(Hear, SupervisionAnswer())  # of states in which it is no keeper yet
    assert not driver.has_started
    assert driver.answer(Adopt, SupervisionAnswer()) == ["w1"]
    assert not driver.has_started
    assert driver.answer(Hear, SupervisionAnswer()) == ["w1"]
    assert driver.has_started


def test_supervisor_waits_on_when_the_others_are_late_and_none_is_an_heir() -> None:
    driver = Driver(0, worker(1), worker(2))
    driver.begin()
    driver.answer(Hear, SupervisionAnswer())
    driver.wait()  # with no patience left
    assert not driver.has_started
    driver.asked.sort(key=lambda one: one.to)
    late = driver.asked.pop()
    assert late.to == "w2"
    driver.answer(Adopt, SupervisionAnswer())
    driver.answer(Hear, SupervisionAnswer())
    assert driver.has_started


@pytest.mark.parametrize("failure", [PASSES, STAYS])
def test_worker_is_asked_again_if_it_may_answer_then(failure: Failed) -> None:
    driver = Driver(0, worker(1))
    driver.begin()
    driver.answer(Hear, SupervisionAnswer())
    driver.answer(Adopt, failure)
    assert driver.has_started == (failure is STAYS)
    assert not driver.answer(Adopt, SupervisionAnswer())  # not before a while has passed
    driver.wait()
    assert bool(driver.answer(Adopt, SupervisionAnswer())) == (failure is PASSES)
    driver.answer(Hear, SupervisionAnswer())
    assert driver.has_started


def test_supervisor_starts_when_the_worker_that_it_waits_for_is_gone() -> None:
    driver = Driver(0, worker(1))
    driver.begin()
    driver.around.there = []
    driver.machine.look()
    driver.carry_out()
    driver.answer(Adopt, PASSES)
    assert driver.has_started


def test_newcomer_is_asked_to_keep_the_plan() -> None:
    driver = Driver(0)
    driver.begin()
    driver.around.there = [worker(1)]
    driver.machine.look()
    driver.carry_out()
    assert driver.answer(Adopt, SupervisionAnswer()) == ["w1"]


def test_user_who_waits_no_longer_gives_up() -> None:
    driver = Driver(0, worker(1))
    driver.begin()
    error = TimeoutError("it took too long")
    driver.machine.fail_start(error)
    driver.carry_out()
    assert driver.others.count(Started(error)) == 1
    assert driver.machine.state.is_over


def running(keepers: tuple[int, ...] = (0,)) -> SupervisionState:
    state = SupervisionState.first(KEY, ("it",), worker(0).keeper, 0)
    child = state.children[0]._replace(phase="running", owner="w0", rref="a reference")
    return state._replace(
        keepers=tuple(worker(n).keeper for n in keepers), children=(child,), version=1
    )


def test_keeper_takes_over_when_the_supervisor_is_gone() -> None:
    driver = Driver(1, worker(0), state=running((0, 1)))
    driver.machine.adopt(running((0, 1)), PLAN)
    driver.carry_out()
    assert driver.machine.leading is None
    driver.around.there = []
    driver.machine.look()
    driver.carry_out()
    assert TakesOver(("it",), "w0") in driver.others
    assert driver.machine.state.term == (2, -1)


def test_worker_hands_the_plan_to_the_successor() -> None:
    driver = Driver(2, worker(1), state=running((0, 1)))
    driver.machine.hear(running((0, 1)), PLAN)
    driver.carry_out()
    assert driver.answer(AskState, running((0, 1))) == ["w1"]
    assert driver.answer(Adopt, PASSES) == ["w1"]
    (again,) = driver.asked
    assert isinstance(again.question, Adopt)
    assert again.question.is_bare  # it had not met an owner
    driver.answer(Adopt, PASSES)
    assert not driver.asked


def test_worker_that_was_met_again_is_told_of_the_state() -> None:
    driver = Driver(2, worker(0, meeting=100), state=running((0, 2)))
    driver.machine.hear(running((0, 2)))
    driver.carry_out()
    newer = running((0, 2))._replace(epoch=2, leader_id=0)
    assert driver.answer(Hear, SupervisionAnswer(other=newer)) == ["w0"]
    assert driver.machine.state == newer


def test_end_is_told_once_to_those_that_may_not_have_heard() -> None:
    driver = Driver(2, worker(0), worker(1), state=running((0,)))
    over = running((0,))._replace(version=2, given_up="why")
    for _ in range(2):
        driver.machine.hear(over)
        driver.carry_out()
    assert [one.to for one in driver.asked] == ["w1"]


@pytest.mark.parametrize(("me", "told"), [(1, ["w2"]), (2, [])])
def test_successor_tells_keepers_of_an_end_whose_supervisor_has_died(
    me: int, told: list[str]
) -> None:
    """Seed 326870: one keeper had asked another, before that one heard of the end."""
    rest = [worker(number) for number in (1, 2, 3) if number != me]
    driver = Driver(me, worker(0), *rest, state=running((0, 1, 2)))
    driver.machine.hear(running((0, 1, 2))._replace(version=2, given_up="why"))
    driver.carry_out()
    assert [one.to for one in driver.asked] == ["w3"]
    driver.around.there = rest
    for _ in range(2):
        driver.machine.look()
        driver.carry_out()
    assert [one.to for one in driver.asked[1:]] == told


def test_killed_object_is_told_to_the_keepers_and_outdated_ones_are_dropped() -> None:
    driver = Driver(0, worker(1), state=running((0, 1)))
    edition = driver.machine.state.children[0].edition
    assert driver.machine.make(0, edition, "first", running((0, 1)))
    later = edition._replace(generation=2)
    assert driver.machine.make(0, later, "second", running((0, 1)))
    driver.machine.killed("second")
    driver.carry_out()
    assert DropObjects(["first"]) in driver.others
    assert [one.to for one in driver.asked if isinstance(one.question, TellKilled)] == ["w0", "w1"]


def test_successor_that_can_not_keep_the_plan_is_passed_over() -> None:
    driver = Driver(2, worker(1), state=running((0,)))
    driver.machine.hear(running((0,)), PLAN)
    driver.carry_out()
    for _ in range(2):  # with the references, and without them
        assert driver.answer(Adopt, STAYS) == ["w1"]
    assert driver.machine.leading is not None


def test_successor_that_was_not_reached_is_asked_again() -> None:
    driver = Driver(2, worker(1), state=running((0,)))
    driver.machine.hear(running((0,)), PLAN)
    driver.carry_out()
    for _ in range(2):
        assert driver.answer(Adopt, PASSES) == ["w1"]
    assert not driver.answer(Adopt, SupervisionAnswer())
    driver.wait()
    assert driver.answer(Adopt, SupervisionAnswer()) == ["w1"]


def test_worker_without_the_plan_tells_the_next_one() -> None:
    driver = Driver(1, worker(2), state=running((0,)))
    driver.machine.hear(running((0,)))
    driver.carry_out()
    assert driver.answer(Hear, SupervisionAnswer()) == ["w2"]
