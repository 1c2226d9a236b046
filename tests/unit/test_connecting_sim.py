"""Workers are reached and declared dead, under simulated faults of hosts and networks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from click.testing import CliRunner
from simulator.connecting import ConnectingBug, simulate_connecting
from simulator.sim import main

from farcall.protocol.connecting import (
    Address,
    Cause,
    Connecting,
    Dead,
    DialFailure,
    Pause,
    Try,
    WaitForDialler,
)

SCHEDULES = 1000  # `make sim` runs ten thousand
SEARCHED = 2000  # schedules in which a planted mistake has to be found


@pytest.mark.parametrize("block", range(4))
def test_invariants_hold_in_every_schedule(block):  # CON-1 .. CON-6
    size = SCHEDULES // 4
    for seed in range(block * size, (block + 1) * size):
        assert simulate_connecting(seed).violations == (), f"simulate_connecting({seed}).log"


def test_seed_replays_to_the_last_event():
    for seed in range(20):
        one, other = simulate_connecting(seed), simulate_connecting(seed)
        assert [str(event) for event in one.log] == [str(event) for event in other.log]
        assert one.violations == other.violations


def test_schedules_have_all_kinds_of_faults():
    logs = [" ".join(str(event) for event in simulate_connecting(seed).log) for seed in range(500)]
    hosts = ("is up", "is dark", "is backlog full", "is unreachable", "is name server fails")
    gone = ("is worker gone", "is restarted", "is another worker", "has another secret")
    for what in (*hosts, *gone, "says nothing", "refuses connections"):
        assert sum(what in log for log in logs) > 10, what
    for failure in DialFailure:
        assert sum(f"failed: {failure.name}" in log for log in logs) > 10, failure
    for what in (
        "Try(",
        "Talk(",
        "Pause(",
        "WaitForDialler(",
        "Linked(",
        "Late(",
        "Dead(",
        "has a link",
    ):
        assert sum(what in log for log in logs) > 20, what
    for cause in Cause:
        assert sum(f"<Cause.{cause.name}" in log for log in logs) > 5, cause
    assert sum("is interrupted" in log for log in logs) > 5
    for what in ("has stood still", "within inf s", "within 0.1 s", "tcp:2"):
        assert sum(what in log for log in logs) > 20, what


FINDS = {
    ConnectingBug.DEAD_BY_ANY_ERROR: {"CON-1"},
    ConnectingBug.COUNTS_OWN_FAILURES: {"CON-1"},
    ConnectingBug.TAKES_OWN_FAILURES_FOR_DEATH: {"CON-1"},
    ConnectingBug.GIVES_UP_AT_UNFINISHED_HANDSHAKE: {"CON-1"},
    ConnectingBug.NEVER_TAKES_NO: {"CON-4", "CON-5"},
    ConnectingBug.IGNORES_ABSENCE: {"CON-4", "CON-5"},
    ConnectingBug.IGNORES_DEADLINE: {"CON-2"},
    ConnectingBug.TALKS_BEYOND_DEADLINE: {"CON-2"},
    ConnectingBug.NEVER_COUNTS_SILENCE: {"CON-5"},
    ConnectingBug.COUNTS_TIME_BETWEEN_CALLS: {"CON-1"},
    ConnectingBug.COUNTS_STANDSTILLS: {"CON-1"},
    ConnectingBug.ONE_ROUND_WILL_DO: {"CON-1"},
    ConnectingBug.COUNTS_SHORT_TRIES: {"CON-1"},
    ConnectingBug.OWN_FAILURE_ENDS_SILENCE: {"CON-5"},
    ConnectingBug.STRANGER_ENDS_SILENCE: {"CON-5"},
    ConnectingBug.LAST_REFUSAL_IS_FINAL: {"CON-1"},
    ConnectingBug.IS_LATE_TOO_SOON: {"CON-2"},
    ConnectingBug.WAITS_FOR_SILENT_STRANGERS: {"CON-3"},
    ConnectingBug.GIVES_UP_IN_THE_END: {"CON-1"},
    ConnectingBug.BACKS_OFF_WITHOUT_BOUND: {"CON-3"},
    ConnectingBug.ONLY_FIRST_ADDRESS: {"CON-1", "CON-3"},
    ConnectingBug.ALL_DIAL: {"CON-6"},
    ConnectingBug.KEEPS_ITS_PLACE: {"CON-6"},
    ConnectingBug.FIRST_COME_FIRST_SERVED: {"CON-6"},
}


# The schedules that find the rare ones; these are tried first.
FOUND_BY = {
    ConnectingBug.GIVES_UP_AT_UNFINISHED_HANDSHAKE: 180,
    ConnectingBug.COUNTS_TIME_BETWEEN_CALLS: 447,
    ConnectingBug.COUNTS_SHORT_TRIES: 187,
    ConnectingBug.OWN_FAILURE_ENDS_SILENCE: 937,
    ConnectingBug.STRANGER_ENDS_SILENCE: 327,
    ConnectingBug.WAITS_FOR_SILENT_STRANGERS: 603,
}


@pytest.mark.parametrize("bug", ConnectingBug, ids=lambda bug: bug.value)
def test_planted_bug_is_found(bug):
    for seed in (FOUND_BY.get(bug, 0), *range(SEARCHED)):
        violations = simulate_connecting(seed, bug=bug).violations
        if violations:
            assert violations[0].invariant in FINDS[bug]
            return
    pytest.fail(f"{bug.value} was not found")


# The machine, by hand.


def one_address(dead_after: float = 30.0) -> Connecting:
    return Connecting([Address("tcp:0")], dead_after)


def fail_in_a_row(
    machine: Connecting, caller: object, how: Iterable[tuple[DialFailure, float]], now: float = 0.0
) -> object:
    """Give these failures to a caller without a deadline, each after so many seconds.

    Returns:
        The last instruction.
    """
    said: object = machine.begin(caller, now, float("inf"))
    for failure, seconds in how:
        assert isinstance(said, Try)
        now += seconds
        said = machine.failed(now, failure, 0.5)
        if isinstance(said, Pause):
            now = said.until
            said = machine.woke(caller, now, float("inf"))
    return said


def test_con1_silence_takes_the_bound_in_several_rounds():
    dark = [(DialFailure.TIMED_OUT, 7.5)]
    assert isinstance(fail_in_a_row(one_address(), 1, 3 * dark), Try)
    said = fail_in_a_row(one_address(), 1, 4 * dark)
    assert isinstance(said, Dead)
    assert said.cause is Cause.SILENT
    assert isinstance(fail_in_a_row(one_address(0.0), 1, 100 * dark), Try)  # 0: never


def test_con1_time_of_a_standstill_does_not_count():
    assert isinstance(fail_in_a_row(one_address(), 1, 3 * [(DialFailure.NO_ANSWER, 60.0)]), Try)


def test_con1_time_between_calls_does_not_count():
    machine = one_address()
    for call in range(5):
        began = 1000.0 * call
        assert isinstance(machine.begin(call, began, began + 4.0), Try)
        machine.failed(began + 4.0, DialFailure.TIMED_OUT, 0.5)
    assert machine.silent == pytest.approx(20.0)


def test_con1_own_failures_say_nothing_in_either_direction():
    own, dark = (DialFailure.OF_THIS_MACHINE, 5.0), (DialFailure.TIMED_OUT, 7.5)
    assert isinstance(fail_in_a_row(one_address(), 1, 100 * [own]), Try)
    assert isinstance(fail_in_a_row(one_address(), 1, [dark, dark, own, dark, dark]), Dead)


def test_con5_calls_with_little_time_add_up():
    machine, said, now = one_address(2.0), None, 0.0
    for call in range(30):
        machine.begin(call, now, now + 0.25)
        said = machine.failed(now + 0.25, DialFailure.TIMED_OUT, 0.5)
        now += 100.0
        if isinstance(said, Dead):
            return
    pytest.fail(f"{said} after {machine.silent} s")


def test_con6_the_most_patient_caller_goes_on():
    machine = one_address()
    assert isinstance(machine.begin("first", 0.0, 1.0), Try)
    assert machine.begin("patient", 0.0, 60.0) == WaitForDialler(60.0)
    machine.left("first")
    assert machine.begin("hasty", 0.5, 1.0) == WaitForDialler(1.0)
    assert isinstance(machine.woke("patient", 0.5, 60.0), Try)


# The command line.


def test_command_line_simulates_connecting():
    result = CliRunner().invoke(main, ["--protocol", "connecting", "--schedules", "20"])
    assert result.exit_code == 0
    assert result.output.startswith("20 schedules, ")


def test_command_line_replays_a_planted_mistake():
    arguments = ["--protocol", "connecting", "--plant", "ignores-deadline"]
    result = CliRunner().invoke(main, [*arguments, "--schedules", "20"])
    assert result.exit_code == 1
    command = result.output.splitlines()[2].split("simulator.sim ")[1].split()
    assert {"--replay", "--protocol", "connecting", "--plant", "ignores-deadline"} <= set(command)
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 1
    assert "VIOLATION CON-2" in again.output
