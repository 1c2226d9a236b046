"""Deadlines: every call that is not over comes due once, in time, and at most 10 ms late."""

from __future__ import annotations

import math
import threading

from hypothesis import given
from hypothesis import strategies as st

from farcall.runtime.deadlines import SLOTS_PER_SECOND, Deadlines

SLOT = 1 / SLOTS_PER_SECOND


def test_call_comes_due_once_after_its_deadline() -> None:
    deadlines = Deadlines[str]()
    deadlines.add(5.0, "a")
    deadlines.add(7.0, "b")
    assert deadlines.due(4.99) == []
    assert deadlines.due(5.0 + SLOT) == ["a"]
    assert deadlines.due(100.0) == ["b"]
    assert deadlines.due(1000.0) == []


def test_call_that_ended_does_not_come_due() -> None:
    deadlines = Deadlines[str]()
    deadlines.add(5.0, "a")
    deadlines.add(5.0, "b")
    deadlines.discard(5.0, "a")
    deadlines.discard(5.0, "never added")
    deadlines.discard(9.0, "a")
    assert deadlines.due(10.0) == ["b"]


def test_call_without_deadline_is_not_kept() -> None:
    deadlines = Deadlines[str]()
    assert not deadlines.add(math.inf, "a")
    deadlines.discard(math.inf, "a")
    assert deadlines.due(1e12) == []
    assert deadlines.sleep_until(0.0) == math.inf


def test_sleeper_is_woken_only_for_what_comes_before_its_alarm() -> None:
    deadlines = Deadlines[str]()
    assert not deadlines.add(5.0, "before anybody sleeps")
    assert 5.0 <= deadlines.sleep_until(0.0) < 5.0 + 2 * SLOT
    assert not deadlines.add(6.0, "later")
    assert deadlines.add(4.0, "sooner")
    assert 4.0 <= deadlines.sleep_until(0.0) < 4.0 + 2 * SLOT


def test_sleeper_without_alarm_is_woken_for_everything() -> None:
    deadlines = Deadlines[str]()
    assert deadlines.sleep_until(0.0) == math.inf
    assert deadlines.add(1e9, "a")


def test_sleeper_is_not_woken_for_calls_that_come_and_go() -> None:
    deadlines = Deadlines[str]()
    assert deadlines.sleep_until(0.0) == math.inf
    for start in range(50):
        woken = deadlines.add(start + 60.0, "call")
        assert woken is (start == 0)
        assert deadlines.sleep_until(start) == 60.0
        deadlines.discard(start + 60.0, "call")
        assert deadlines.due(start) == []
        assert deadlines.sleep_until(start) == 60.0
    assert deadlines.sleep_until(61.0) == math.inf


def test_thousands_of_finished_calls_leave_nothing_behind() -> None:
    deadlines = Deadlines[int]()
    for number in range(10_000):
        deadlines.add(number / 1000, number)
        deadlines.discard(number / 1000, number)
    deadlines.add(60.0, -1)
    assert deadlines.due(0.0) == []  # empty slots are forgotten even before their time
    assert 60.0 <= deadlines.sleep_until(0.0) < 60.0 + 2 * SLOT


@given(
    st.dictionaries(st.integers(0, 50), st.floats(0, 3), max_size=30),
    st.sets(st.integers(0, 50)),
    st.lists(st.floats(0, 3.5), max_size=8),
)
def test_due_is_what_has_passed_and_nothing_else(
    calls: dict[int, float], ended: set[int], looks: list[float]
) -> None:
    deadlines = Deadlines[int]()
    for key, deadline in calls.items():
        deadlines.add(deadline, key)
    for key in ended & calls.keys():
        deadlines.discard(calls[key], key)
    left = {key: deadline for key, deadline in calls.items() if key not in ended}
    for now in sorted(looks):
        due = deadlines.due(now)
        assert len(due) == len(set(due))
        for key in due:
            assert left.pop(key) <= now + 1e-9
        assert all(deadline > now - 2 * SLOT for deadline in left.values())
        assert deadlines.sleep_until(now) <= min(left.values(), default=math.inf) + 2 * SLOT
    assert set(deadlines.due(math.inf if not left else max(left.values()) + SLOT)) == set(left)


def test_many_threads_lose_and_double_nothing() -> None:
    deadlines = Deadlines[tuple[int, int]]()
    taken: list[tuple[int, int]] = []
    done = threading.Event()

    def add(mark: int) -> None:
        for number in range(3000):
            deadlines.add(number / 1000, (mark, number))
            if number % 3 == 0:
                deadlines.discard(number / 1000, (mark, number))

    def take() -> None:
        while not done.is_set():
            taken.extend(deadlines.due(1.5))

    taker = threading.Thread(target=take)
    adders = [threading.Thread(target=add, args=(mark,)) for mark in range(3)]
    for thread in (taker, *adders):
        thread.start()
    for thread in adders:
        thread.join()
    done.set()
    taker.join()
    taken += deadlines.due(10.0)
    kept = {(mark, number) for mark in range(3) for number in range(3000) if number % 3}
    assert kept <= set(taken)
    assert len(taken) == len(set(taken))
