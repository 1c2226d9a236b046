"""Supervision in groups that fall apart and meet again, under simulated losses and deaths."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from simulator.sim import main
from simulator.supervision import SupervisionBug, simulate_supervision

SCHEDULES = 2000
SEARCHED = 2000  # schedules in which a planted mistake has to be found


@pytest.mark.parametrize("block", range(4))
def test_invariants_hold_in_every_schedule(block):  # SUP-5 to SUP-7
    size = SCHEDULES // 4
    for seed in range(block * size, (block + 1) * size):
        assert simulate_supervision(seed).violations == (), f"simulate_supervision({seed}).log"


def test_seed_replays_to_the_last_event():
    for seed in range(20):
        one, other = simulate_supervision(seed), simulate_supervision(seed)
        assert [str(event) for event in one.log] == [str(event) for event in other.log]
        assert one.violations == other.violations


def test_schedules_have_all_kinds_of_faults():
    logs = [" ".join(str(event) for event in simulate_supervision(seed).log) for seed in range(300)]
    for what in ("dies", "breaks", "meet again", "drops", "object killed", "does not make"):
        assert sum(what in log for log in logs) > 10, what
    assert sum("supervises from epoch 3" in log for log in logs) > 10
    assert sum(_dies_when_it_has_started(log) for log in logs) > 10


def _dies_when_it_has_started(log: str) -> bool:
    _, has_started, after = log.partition("w0 has started")
    return bool(has_started) and "w0 dies" in after


FINDS = {
    SupervisionBug.HIGHER_GENERATION_STAYS: {"SUP-5"},
    SupervisionBug.GENERATION_IS_AN_EDITION: {"SUP-5"},
    SupervisionBug.DROPS_WHAT_WAS_ASKED_FOR_LATER: {"SUP-5", "ERROR"},  # it is made again forever
    SupervisionBug.KEEPS_WHAT_IS_OVER: {"SUP-5"},
    SupervisionBug.MAKES_WHAT_IS_OUTDATED: {"SUP-5"},
    SupervisionBug.LEAVES_THE_EARLIER_ONE: {"SUP-5"},
    SupervisionBug.GENERATION_BEFORE_TERM: {"SUP-6"},
    SupervisionBug.KEEPS_ITS_NUMBERS: {"SUP-6"},
    SupervisionBug.STARTS_ALONE: {"SUP-7"},
    SupervisionBug.NEVER_CONSULTS: {"SUP-5"},
    SupervisionBug.NEVER_EXCHANGES: {"SUP-5"},
    SupervisionBug.NEVER_RETIRES: {"SUP-5"},
    SupervisionBug.TELLS_ONCE: {"SUP-5"},
}


# The schedules that find the rare ones; these are tried first.
FOUND_BY = {
    SupervisionBug.DROPS_WHAT_WAS_ASKED_FOR_LATER: 107,
    SupervisionBug.LEAVES_THE_EARLIER_ONE: 73,
    SupervisionBug.STARTS_ALONE: 812,
    SupervisionBug.NEVER_CONSULTS: 843,
    SupervisionBug.TELLS_ONCE: 1182,
}


@pytest.mark.parametrize("bug", SupervisionBug, ids=lambda bug: bug.value)
def test_planted_bug_is_found(bug):
    for seed in (FOUND_BY.get(bug, 0), *range(SEARCHED)):
        violations = simulate_supervision(seed, bug=bug).violations
        if violations:
            assert violations[0].invariant in FINDS[bug]
            return
    pytest.fail(f"{bug.value} was not found")


def test_command_line_simulates_supervision():
    result = CliRunner().invoke(main, ["--protocol", "supervision", "--schedules", "20"])
    assert result.exit_code == 0
    assert result.output.startswith("20 schedules, ")
