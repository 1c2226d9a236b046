"""When supervised objects are made again: SUP-1 to SUP-4, for any order of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.protocol.supervision import (
    Candidate,
    Make,
    Phase,
    Strategy,
    SupervisionMachine,
    Target,
    choose,
)


def running(count: int, strategy: Strategy, restarts: int = 3) -> SupervisionMachine:
    machine = SupervisionMachine(count, strategy, restarts, 60.0)
    machine.begin()
    while to_do := machine.take():
        for child, generation in to_do:
            assert machine.made(child, generation)
    return machine


@pytest.mark.parametrize(
    ("strategy", "again"),
    [(Strategy.ONE, {1}), (Strategy.REST, {1, 2}), (Strategy.ALL, {0, 1, 2})],
)
def test_strategy_says_what_is_made_again(strategy: Strategy, again: set[int]) -> None:
    machine = running(3, strategy)
    machine.on_children_lost([1], "a death", 0.0)
    assert {n for n, generation in enumerate(machine.generations) if generation == 2} == again
    first = machine.take()
    assert first == [Make(min(again), 2)]  # the others come after it


def test_a_death_counts_once_however_many_it_takes() -> None:
    machine = running(3, Strategy.ONE, restarts=1)
    machine.on_children_lost([0, 1, 2], "a death", 0.0)
    assert not machine.given_up
    machine.failed(0, 2, "an error", 1.0)
    assert machine.given_up == "more than 1 restarts within 60 s: an error"
    assert machine.is_over


def test_restarts_long_ago_do_not_count() -> None:
    machine = running(1, Strategy.ONE, restarts=1)
    for round, now in enumerate((0.0, 60.0, 120.0), start=2):
        machine.on_children_lost([0], "a death", now)
        assert machine.made(0, round)
    machine.on_children_lost([0], "a death", 179.0)
    assert machine.given_up


def test_ended_child_is_not_made_again() -> None:
    machine = running(2, Strategy.ALL)
    machine.ended(0, 1)
    machine.on_children_lost([1], "a death", 0.0)
    assert machine.phases == [Phase.ENDED, Phase.MAKING]
    machine.made(1, 2)
    machine.ended(1, 2)
    assert machine.is_over


def test_successor_makes_anew_the_object_that_was_being_made() -> None:
    machine = SupervisionMachine(3, Strategy.ONE, 3, 60.0)
    machine.resume([Phase.RUNNING, Phase.MAKING, Phase.ENDED], [1, 4, 2], [5.0])
    assert machine.take() == [Make(1, 5)]
    assert not machine.made(1, 4)
    assert machine.times == [5.0]


events = st.lists(
    st.tuples(st.sampled_from(["made", "failed", "lost", "ended", "wait"]), st.integers(0, 3)),
    max_size=60,
)


@given(st.sampled_from(list(Strategy)), st.integers(0, 3), st.integers(1, 4), events)
def test_invariants_hold_for_any_order_of_events(
    strategy: Strategy, restarts: int, count: int, events: list[tuple[str, int]]
) -> None:
    machine = SupervisionMachine(count, strategy, restarts, 10.0)
    machine.begin()
    asked: set[Make] = set()
    being_made: dict[int, int] = {}
    times: list[float] = []
    now = 0.0
    for event, number in [("wait", 0), *events]:
        child = number % count
        was_over, ended = machine.is_over, set(_in(machine, Phase.ENDED))
        generations = list(machine.generations)
        match event:
            case "made":
                machine.made(child, being_made.get(child, 0))
            case "failed":
                if machine.failed(child, being_made.get(child, 0), "an error", now):
                    times.append(now)
            case "lost":
                ran = machine.phases[child] is Phase.RUNNING and not machine.given_up
                machine.on_children_lost([child], "a death", now)
                times += [now] if ran else []
            case "ended":
                machine.ended(child, machine.generations[child])
            case "wait":
                now += number
        to_do = machine.take()
        assert not (was_over and to_do)  # SUP-4
        assert not ended & {one.child for one in to_do}
        for one in to_do:
            assert one not in asked  # SUP-1
            assert one.generation == machine.generations[one.child]
            asked.add(one)
            being_made[one.child] = one.generation
            if strategy is not Strategy.ONE:  # SUP-3
                before = machine.phases[: one.child]
                assert all(phase in (Phase.RUNNING, Phase.ENDED) for phase in before)
        assert all(a <= b for a, b in zip(generations, machine.generations, strict=True))
        recent = [time for time in times if now - time < 10.0]
        if times and times[-1] == now:
            assert bool(machine.given_up) == (len(recent) > restarts) or was_over  # SUP-2


def _in(machine: SupervisionMachine, phase: Phase) -> list[int]:
    return [child for child, found in enumerate(machine.phases) if found is phase]


THERE = [Candidate(f"w{n}", n, "ps" if n else "") for n in range(4)]


@pytest.mark.parametrize(
    ("target", "how", "chosen"),
    [
        (Target("w2", "ps"), {}, "w2"),
        (Target("w9", "ps"), {"waits": True}, None),
        (Target("w9", "ps"), {}, "w1"),
        (Target("", "ps"), {"load": {"w1": 2, "w2": 1, "w3": 1}}, "w2"),
        (Target("", "ps"), {"last": "w1"}, "w2"),
        (Target("", ""), {"last": "w0"}, "w0"),
        (Target("", "trainer"), {}, None),
    ],
)
def test_place_of_a_child(target: Target, how: dict[str, Any], chosen: str | None) -> None:
    found = choose(target, THERE, **{"load": {}, "last": "", "waits": False, **how})
    assert (found and found.name) == chosen
