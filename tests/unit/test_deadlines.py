"""Deadlines: every call that is not over comes due in time, and at most a pause late."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from farcall.runtime.calls.deadlines import PAUSE, Deadlines


@dataclass(eq=False)
class Call:
    deadline: float


@dataclass
class Calls:
    """The table that a `Deadlines` looks at."""

    open: dict[int, Call] = field(default_factory=dict)
    looks: int = 0

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.look)

    def look(self) -> list[Call]:
        self.looks += 1
        return list(self.open.values())

    def begin(self, key: int, deadline: float) -> bool:
        self.open[key] = Call(deadline)
        return self.deadlines.note(deadline)

    def end(self, key: int) -> None:
        del self.open[key]

    def due(self, now: float) -> set[int]:
        """Return the due calls, which end with that."""
        due = self.deadlines.due(now)
        keys = {key for key, call in self.open.items() if call in due}
        assert len(keys) == len(due)
        for key in keys:
            del self.open[key]
        return keys


def test_call_comes_due_once_after_its_deadline() -> None:
    calls = Calls()
    calls.begin(1, 5.0)
    calls.begin(2, 7.0)
    assert calls.due(4.99) == set()
    assert calls.due(5.0) == {1}
    assert calls.due(6.99) == set()
    assert calls.due(7.5) == {2}
    assert calls.due(1000.0) == set()


def test_call_that_ended_does_not_come_due() -> None:
    calls = Calls()
    calls.begin(1, 5.0)
    calls.begin(2, 5.0)
    calls.end(1)
    assert calls.due(10.0) == {2}


def test_call_without_deadline_is_never_due() -> None:
    calls = Calls()
    assert not calls.begin(1, math.inf)
    assert calls.deadlines.next == math.inf
    assert calls.due(1e12) == set()


def test_sleeper_is_woken_only_for_deadlines_before_its_alarm() -> None:
    calls = Calls()
    assert calls.deadlines.next == math.inf
    assert calls.begin(1, 5.0)
    assert calls.deadlines.next == 5.0
    assert not calls.begin(2, 6.0)
    assert calls.begin(3, 4.0)
    assert calls.deadlines.next == 4.0


def test_sleeper_is_not_woken_for_calls_that_come_and_go() -> None:
    calls = Calls()
    for start in range(50):
        woken = calls.begin(1, start + 60.0)
        assert woken is (start == 0)
        calls.end(1)
        assert calls.due(start) == set()
        assert calls.deadlines.next == 60.0
    assert calls.looks == 0  # and what has ended costs nothing
    assert calls.due(61.0) == set()
    assert calls.deadlines.next == math.inf


def test_calls_that_are_due_one_after_the_other_are_gathered() -> None:
    calls = Calls()
    for key in range(1000):
        calls.begin(key, 1.0 + key * 1e-5)
    found = set()
    for step in range(1200):
        found |= calls.due(1.0 + step * 1e-5)
    assert calls.looks <= 3
    # A look may take long here, for another process has the core.
    found |= calls.due(1000.0)
    assert found == set(range(1000))


@given(
    st.dictionaries(st.integers(0, 50), st.floats(0, 3), max_size=30),
    st.sets(st.integers(0, 50)),
    st.lists(st.floats(0, 3.5), max_size=8),
)
def test_due_are_passed_deadlines_and_no_others(
    begun: dict[int, float], ended: set[int], looks: list[float]
) -> None:
    calls = Calls()
    for key, deadline in begun.items():
        calls.begin(key, deadline)
    for key in ended & begun.keys():
        calls.end(key)
    left = {key: deadline for key, deadline in begun.items() if key not in ended}
    has_looked = False
    for now in sorted(looks):
        before = calls.deadlines.next
        for key in calls.due(now):
            assert left.pop(key) <= now
        if before <= now:
            has_looked = True
            assert all(deadline > now for deadline in left.values())
            # With nothing due it is the first deadline, if that is not too soon.
            first = min(left.values(), default=math.inf)
            assert first <= calls.deadlines.next
            assert first - now < PAUSE or calls.deadlines.next < math.inf or first == math.inf
        else:
            # After a look, calls may be due for a pause before the next one.
            assert has_looked or all(deadline >= before for deadline in left.values())
    assert calls.due(1e9) == set(left)


def test_many_threads_lose_nothing() -> None:
    calls = Calls()
    taken: set[int] = set()
    done = threading.Event()

    def begin(mark: int) -> None:
        for number in range(mark, 9000, 3):
            calls.begin(number, number / 3000)
            if number % 7 == 0:
                calls.open.pop(number, None)

    def take() -> None:
        now = 0.0
        while not done.is_set():
            now += PAUSE
            for call in calls.deadlines.due(now):
                taken.add(round(call.deadline * 3000))
                calls.open.pop(round(call.deadline * 3000), None)

    taker = threading.Thread(target=take)
    beginners = [threading.Thread(target=begin, args=(mark,)) for mark in range(3)]
    for thread in (taker, *beginners):
        thread.start()
    for thread in beginners:
        thread.join()
    done.set()
    taker.join()
    taken |= calls.due(1e9)
    assert {number for number in range(9000) if number % 7} <= taken
