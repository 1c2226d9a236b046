"""Leaving together, under simulated calls, deaths and standstills."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from simulator.sim import main
from simulator.termination import TerminationBug, simulate_termination

SCHEDULES = 4000
SEARCHED = 2000  # schedules in which a planted mistake has to be found


@pytest.mark.parametrize("block", range(4))
def test_invariants_hold_in_every_schedule(block):  # DEP-1 .. DEP-5
    size = SCHEDULES // 4
    for seed in range(block * size, (block + 1) * size):
        assert simulate_termination(seed).violations == (), f"simulate_termination({seed}).log"


def test_seed_replays_to_the_last_event():
    for seed in range(20):
        one, other = simulate_termination(seed), simulate_termination(seed)
        assert [str(event) for event in one.log] == [str(event) for event in other.log]
        assert one.violations == other.violations


def test_schedules_have_all_kinds_of_faults():
    logs = [" ".join(str(event) for event in simulate_termination(seed).log) for seed in range(500)]
    for what in ("dies", "stands still forever", "stands still for 0.", "gives up", "leaves"):
        assert sum(what in log for log in logs) > 10, what
    for what in ("Drain(", "Drained(", "Dismiss(", "Call(", "Answer(", "the end of the link"):
        assert sum(what in log for log in logs) > 50, what


FINDS = {
    TerminationBug.ONE_ROUND_WILL_DO: {"DEP-1"},
    TerminationBug.ANSWERS_ALWAYS_THE_SAME: {"DEP-1"},
    TerminationBug.ANSWERS_BEFORE_READY: {"DEP-1"},
    TerminationBug.ANSWERS_WHILE_BUSY: {"DEP-1"},
    TerminationBug.WAITS_FOR_THE_DEAD: {"DEP-2"},
    TerminationBug.SUCCESSOR_DOES_NOT_ASK: {"DEP-2"},
    TerminationBug.WAITS_FOR_THE_ANSWERS_OF_THE_DEAD: {"DEP-2"},
    TerminationBug.DIES_WITH_ITS_LEADER: {"DEP-1"},
    TerminationBug.KEEPS_ANSWERS: {"DEP-1"},
    TerminationBug.LEADER_DOES_NOT_ASK_ITSELF: {"DEP-1"},
    TerminationBug.LOST_ENDS_THE_ROUND: {"DEP-1"},
    TerminationBug.NEVER_GIVES_UP: {"DEP-4"},
    TerminationBug.GIVES_UP_AT_ONCE: {"DEP-3"},
    TerminationBug.COUNTS_STANDSTILLS: {"DEP-3"},
    TerminationBug.ANSWERS_DO_NOT_COUNT: {"DEP-3"},
    TerminationBug.COUNTS_QUESTIONS_ONLY: {"DEP-3"},
}


# The schedules that find the rare ones; these are tried first.
FOUND_BY = {
    TerminationBug.ANSWERS_ALWAYS_THE_SAME: 1601,
    TerminationBug.SUCCESSOR_DOES_NOT_ASK: 126,
    TerminationBug.LOST_ENDS_THE_ROUND: 1601,
}


@pytest.mark.parametrize("bug", TerminationBug, ids=lambda bug: bug.value)
def test_planted_bug_is_found(bug):
    for seed in (FOUND_BY.get(bug, 0), *range(SEARCHED)):
        violations = simulate_termination(seed, bug=bug).violations
        if violations:
            assert violations[0].invariant in FINDS[bug]
            return
    pytest.fail(f"{bug.value} was not found")


def test_command_line_simulates_termination():
    result = CliRunner().invoke(main, ["--protocol", "termination", "--schedules", "20"])
    assert result.exit_code == 0
    assert result.output.startswith("20 schedules, ")
