"""The protocol under simulated faults, and the simulator itself."""

from __future__ import annotations

from random import Random

import pytest
from click.testing import CliRunner

from farcall.testing import Faults, ManualClock, Network, PlantedBug, simulate
from farcall.testing.sim import main

SCHEDULES = 2000
RELIABLE = Faults()
LOSSY = Faults(loss=0.3, duplication=0.3, reordering=0.5)
DEADLY = Faults(reordering=0.2, crash=0.1, restart=0.7, partition=0.1)


@pytest.mark.parametrize("block", range(4))
def test_invariants_hold_in_every_schedule(block):  # REF-1 .. REF-4, CALL-1 .. CALL-3
    size = SCHEDULES // 4
    for seed in range(block * size, (block + 1) * size):
        assert simulate(seed).violations == (), f"replay with simulate({seed}).log"


@pytest.mark.parametrize("faults", [RELIABLE, LOSSY, DEADLY], ids=["reliable", "lossy", "deadly"])
def test_invariants_hold_under_given_faults(faults):
    for seed in range(200):
        assert simulate(seed, faults).violations == ()


def test_seed_replays_to_the_last_event():
    for seed in range(20):
        one, other = simulate(seed), simulate(seed)
        assert [str(event) for event in one.log] == [str(event) for event in other.log]
        assert one == other


def test_seeds_differ():
    assert len({str(simulate(seed).log) for seed in range(20)}) == 20


def test_violation_replays():
    seed = next(s for s in range(100) if simulate(s, bug=PlantedBug.DOES_NOT_PIN).violations)
    one, other = (simulate(seed, bug=PlantedBug.DOES_NOT_PIN) for _ in range(2))
    assert one.violations == other.violations
    assert str(one.log) == str(other.log)


FINDS = {
    PlantedBug.OWNER_IGNORES_SEQUENCES: {"REF-1", "REF-2"},
    PlantedBug.DOES_NOT_WAIT_FOR_OWNER: {"REF-1"},
    PlantedBug.DOES_NOT_PIN: {"REF-1"},
    PlantedBug.UNPINS_ON_OUTCOME: {"REF-1"},
    PlantedBug.RELEASES_UNCONFIRMED: {"REF-1", "REF-2"},
    PlantedBug.RUNS_DUPLICATES: {"CALL-2", "CALL-3", "REF-4"},
    PlantedBug.SAYS_RECEIVED_AT_ONCE: {"REF-1"},
    PlantedBug.ANSWERS_EVERY_PINNED: {"REF-1"},
    PlantedBug.KEEPS_DEAD_HOLDERS: {"REF-2"},
    PlantedBug.NEVER_REPEATS_RELEASES: {"REF-2"},
    PlantedBug.BELIEVES_IN_FAILED_CREATION: {"REF-2"},
    PlantedBug.FORGETS_CANCELLED: {"CALL-3", "REF-1", "REF-2"},
    PlantedBug.LISTENS_TO_THE_DEAD: {"CALL-2", "REF-4"},
    PlantedBug.FORWARDS_UNACCEPTED: {"REF-1"},
}


@pytest.mark.parametrize("bug", PlantedBug, ids=lambda bug: bug.value)
def test_planted_bug_is_found(bug):
    for seed in range(4000):
        violations = simulate(seed, bug=bug).violations
        if violations:
            assert violations[0].invariant in FINDS.get(bug, {violations[0].invariant})
            return
    pytest.fail(f"{bug.value} was not found")


# The command line.


def test_command_line_sums_up_and_succeeds():
    result = CliRunner().invoke(main, ["--schedules", "20"])
    assert result.exit_code == 0
    assert result.output.startswith("20 schedules, ")
    assert " 0 with violations" in result.output


def test_command_line_fails_and_says_how_to_replay():
    result = CliRunner().invoke(main, ["--schedules", "50", "--plant", "does-not-pin"])
    assert result.exit_code == 1
    assert "-m farcall.testing.sim --replay --seed" in result.output
    assert "--plant does-not-pin" in result.output


def test_command_line_replays_one_schedule():
    result = CliRunner().invoke(main, ["--replay", "--seed", "3"])
    assert result.exit_code == 0
    assert "w0#1 starts" in result.output
    assert "seed 3: " in result.output


# The clock and the network.


def test_clock_moves_by_hand_only_and_never_back():
    clock = ManualClock(10.0)
    assert clock() == 10.0
    assert clock.advance(0.5) == 10.5
    assert clock.advance_to(3.0) == 10.5
    with pytest.raises(ValueError, match="monotonic"):
        clock.advance(-1.0)


def network(faults: Faults) -> Network[int]:
    return Network(ManualClock(), Random(1), faults)


def drain(net: Network[int]) -> list[int]:
    arrivals = iter(net.deliver, None)
    return [message for _, _, message in arrivals]


def test_links_without_reordering_keep_the_order():
    net = network(Faults(duplication=0.5))
    for number in range(50):
        net.send(1, 2, number)
    arrived = drain(net)
    assert arrived == sorted(arrived)
    assert set(arrived) == set(range(50))
    assert len(arrived) > 50


def test_lossy_network_loses_and_reorders():
    net = network(Faults(loss=0.5, reordering=0.5))
    for number in range(100):
        net.send(1, 2, number)
    arrived = drain(net)
    assert 20 < len(arrived) < 80
    assert arrived != sorted(arrived)


def test_cut_fifo_link_holds_its_messages_and_cut_lossy_link_loses_them():
    for faults, after in ((Faults(), [1, 2]), (Faults(reordering=0.1), [])):
        net = network(faults)
        net.cut(1, 2)
        net.send(1, 2, 1)
        net.send(1, 2, 2)
        assert drain(net) == []
        net.heal(1, 2)
        assert drain(net) == after


def test_network_delivers_in_order_of_time_and_moves_the_clock():
    clock = ManualClock()
    net: Network[int] = Network(clock, Random(1), Faults(reordering=0.5))
    for number in range(20):
        net.send(1, 2, number)
    moments = [clock() for _ in iter(net.deliver, None)]
    assert moments == sorted(moments)
    assert moments[0] > 0
