"""Workers meet, part and meet again, under simulated faults of links, processes and stores."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from simulator.directory import DirectoryBug, simulate_directory
from simulator.sim import main

SCHEDULES = 2000
SEARCHED = 2000  # schedules in which a planted mistake has to be found


@pytest.mark.parametrize("block", range(4))
def test_invariants_hold_in_every_schedule(block):  # DIR-1 .. DIR-7, LOOK-1 .. LOOK-6
    size = SCHEDULES // 4
    for seed in range(block * size, (block + 1) * size):
        assert simulate_directory(seed).violations == (), f"simulate_directory({seed}).log"


def test_seed_replays_to_the_last_event():
    for seed in range(20):
        one, other = simulate_directory(seed), simulate_directory(seed)
        assert [str(event) for event in one.log] == [str(event) for event in other.log]
        assert one.violations == other.violations


def test_schedules_have_all_kinds_of_faults():
    logs = [
        " ".join(str(event) for event in simulate_directory(seed).log) for seed in range(SCHEDULES)
    ]
    befalls = ("dies", "leaves", "joins", "breaks", "nothing gets through", "stands still for")
    store = ("the store is dark", "the store is dead", "knows no worker", "no answer in time")
    handshakes = ("linked", "late", "absent", "anew", "refused", "again; meeting 1")
    for what in (*befalls, *store, *handshakes, "it had given this worker up"):
        assert sum(what in log for log in logs) > 0, what


FINDS = {
    DirectoryBug.LOST_TAKES_NAMES: {"DIR-1"},
    DirectoryBug.LOST_KEEPS_NAMES: {"DIR-1"},
    DirectoryBug.UNKNOWN_MEET_AT_FIRST: {"DIR-2"},
    DirectoryBug.KEEPS_NUMBERS_OF_UNKNOWN: {"DIR-6"},
    DirectoryBug.REPEATS_THE_MEETING: {"DIR-2"},
    DirectoryBug.REVIVES_THE_LOST: {"DIR-3"},
    DirectoryBug.WELCOMES_ANY_LATER_MEETING: {"DIR-2", "DIR-5"},
    DirectoryBug.NEVER_TAKES_BACK: {"DIR-2"},
    DirectoryBug.COUNTS_FROM_ITS_OWN: {"DIR-2"},
    DirectoryBug.FORGETS_THE_NUMBER: {"DIR-2", "DIR-3"},
    DirectoryBug.KEEPS_NUMBERS: {"DIR-5"},
    DirectoryBug.FORGETS_NOBODY: {"DIR-5"},
    DirectoryBug.FORGETS_AT_ONCE_EVERYWHERE: {"DIR-6"},
    DirectoryBug.KEEPS_EARLIER_MEETINGS: {"DIR-5"},
    DirectoryBug.DOES_NOT_ASK: {"DIR-4"},
    DirectoryBug.TELLS_OF_NEWCOMERS_ONLY: {"DIR-7"},
    DirectoryBug.ASKS_FOR_EACH: {"LOOK-1"},
    DirectoryBug.HEARS_OLD_CONNECTIONS: {"LOOK-2"},
    DirectoryBug.ASKS_ANEW_WITHOUT_BOUND: {"LOOK-3"},
    DirectoryBug.NEVER_ASKS_ANEW: {"LOOK-4"},
    DirectoryBug.ASKS_ONE_ANEW: {"LOOK-4"},
    DirectoryBug.NEVER_UNSTUCK: {"LOOK-4"},
    DirectoryBug.NEVER_MORE_PATIENT: {"LOOK-4"},
    DirectoryBug.ANSWERS_WHO_JOINS: {"LOOK-6"},
}


# The schedules that find the rare ones; these are tried first.
FOUND_BY = {
    DirectoryBug.LOST_TAKES_NAMES: 800,
    DirectoryBug.KEEPS_NUMBERS_OF_UNKNOWN: 421,
    DirectoryBug.KEEPS_EARLIER_MEETINGS: 351,
    DirectoryBug.NEVER_MORE_PATIENT: 290,
    DirectoryBug.ANSWERS_WHO_JOINS: 280,
}


@pytest.mark.parametrize("bug", DirectoryBug, ids=lambda bug: bug.value)
def test_planted_bug_is_found(bug):
    for seed in (FOUND_BY.get(bug, 0), *range(SEARCHED)):
        violations = simulate_directory(seed, bug=bug).violations
        if violations:
            assert violations[0].invariant in FINDS[bug]
            return
    pytest.fail(f"{bug.value} was not found")


def test_command_line_replays_a_planted_mistake():
    arguments = ["--protocol", "directory", "--plant", "lost-keeps-names"]
    result = CliRunner().invoke(main, [*arguments, "--schedules", "40"])
    assert result.exit_code == 1
    command = result.output.splitlines()[2].split("simulator.sim ")[1].split()
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 1
    assert "VIOLATION DIR-1" in again.output
