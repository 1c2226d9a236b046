"""The protocol under simulated faults, and the simulator itself."""

from __future__ import annotations

from random import Random

import pytest
from click.testing import CliRunner
from simulator.oracle import Oracle
from simulator.planted import PlantedBug
from simulator.sim import Chosen, cover, main
from simulator.sim_records import Machines
from simulator.sim_worker import SimWorker
from simulator.simulation import simulate
from simulator.story import told

from farcall.ids import RefId
from farcall.protocol.instructions import Answer, Follow, Send, TransferKey
from farcall.testing import Faults, ManualClock, Network
from farcall.wire.messages import (
    Accepted,
    Cancel,
    Failure,
    Message,
    Pinned,
    Reference,
    Release,
    Reply,
    Request,
)

SCHEDULES = 2000
RELIABLE = Faults()
LOSSY = Faults(loss=0.3, duplication=0.3, reordering=0.5)
REAL = Faults(crash=0.08, restart=0.7, partition=0.05)
DEADLY = Faults(reordering=0.2, crash=0.1, restart=0.7, partition=0.1)


@pytest.mark.parametrize("block", range(4))
def test_invariants_hold_in_every_schedule(block):  # REF-1 .. REF-4, CALL-1 .. CALL-5
    size = SCHEDULES // 4
    for seed in range(block * size, (block + 1) * size):
        assert simulate(seed).violations == (), f"replay with simulate({seed}).log"


@pytest.mark.parametrize(
    "faults", [RELIABLE, REAL, LOSSY, DEADLY], ids=["reliable", "real", "lossy", "deadly"]
)
def test_invariants_hold_under_given_faults(faults):
    for seed in range(200):
        assert simulate(seed, faults).violations == ()


def test_a_reference_that_arrives_when_only_its_owner_has_given_its_receiver_up():
    """Count it in the meeting that ends then, also if both meet again before it is used."""
    assert simulate(452364).violations == ()


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
    PlantedBug.DOES_NOT_PIN: {"REF-1", "REF-2"},
    PlantedBug.UNPINS_ON_OUTCOME: {"REF-1"},
    PlantedBug.RELEASES_UNCONFIRMED: {"REF-1", "REF-2"},
    PlantedBug.RUNS_DUPLICATES: {"CALL-2", "CALL-3", "REF-4"},
    PlantedBug.SAYS_RECEIVED_AT_ONCE: {"REF-1"},
    PlantedBug.ANSWERS_EVERY_PINNED: {"REF-1"},
    PlantedBug.KEEPS_DEAD_HOLDERS: {"REF-2"},
    PlantedBug.NEVER_REPEATS_RELEASES: {"REF-2"},
    PlantedBug.BELIEVES_IN_FAILED_CREATION: {"REF-2"},
    PlantedBug.FORGETS_CANCELLED: {"CALL-3", "CALL-5", "REF-1", "REF-2"},
    PlantedBug.LISTENS_TO_THE_DEAD: {"REF-2"},
    PlantedBug.RUNS_FOR_THE_DEAD: {"WRK-5"},
    PlantedBug.PINS_FOR_NOBODY: {"REF-1"},
    PlantedBug.KEEPS_PINS_OF_UNSENT: {"REF-2"},
    PlantedBug.WAITS_FOR_UNSENT_CREATION: {"REF-2"},
    PlantedBug.FORGETS_GIVEN_UP_CREATION: {"REF-2"},
    PlantedBug.ASKS_BEFORE_THE_ANSWER: {"REF-2"},
    PlantedBug.NEVER_CANCELS_LATE_SENT: {"CALL-3", "REF-2"},
    PlantedBug.FORGETS_NOBODY: {"REF-2"},
    PlantedBug.NEVER_PINS_ANSWERS: {"REF-1"},
    PlantedBug.SAYS_RECEIVED_FOR_THE_UNSEEN: {"REF-1"},
    PlantedBug.TAKES_THOSE_MET_AGAIN_FOR_LOST: {"REF-1"},
    PlantedBug.COUNTS_USES_OF_BEFORE: {"REF-2"},
    PlantedBug.FORWARDS_UNACCEPTED: {"REF-1"},
    PlantedBug.REPLIES_UNACCEPTED: {"REF-1"},
    PlantedBug.TAKES_OWN_ONCE: {"REF-1", "REF-2"},
    PlantedBug.COUNTS_BEFORE_IT_LOOKS: {"REF-2"},
    PlantedBug.LETS_GO_WHEN_SENT: {"REF-1"},
    PlantedBug.KEEPS_FOR_ABANDONED: {"REF-2"},
    PlantedBug.UNPINS_ABANDONED: {"REF-1"},
    PlantedBug.FORGETS_OWN_OF_CANCELLED: {"REF-2"},
    PlantedBug.ANSWERS_WHAT_IS_AWAITED: {"CALL-5"},
}


# The schedules that find the rare ones; these are tried first.
FOUND_BY = {
    PlantedBug.OWNER_IGNORES_SEQUENCES: 570,
    PlantedBug.UNPINS_ON_OUTCOME: 643,
    PlantedBug.LISTENS_TO_THE_DEAD: 137,
    PlantedBug.COUNTS_BEFORE_IT_LOOKS: 1020,
    PlantedBug.UNPINS_WHAT_IS_AWAITED: 780,
    PlantedBug.COUNTS_USES_OF_BEFORE: 695,
}


@pytest.mark.parametrize("bug", PlantedBug, ids=lambda bug: bug.value)
def test_planted_bug_is_found(bug):
    for seed in (FOUND_BY.get(bug, 0), *range(2000)):
        violations = simulate(seed, bug=bug).violations
        # An ERROR is the simulator's own that something broke: the oracle must see it, too.
        if violations and violations[0].invariant != "ERROR":
            assert violations[0].invariant in FINDS.get(bug, {violations[0].invariant})
            return
    pytest.fail(f"{bug.value} was not found")


# By hand: a caller, the owner of what it sends, and the messages between them.


class Stage:
    """Two workers. `deliver` brings the oldest message of a kind, whatever it overtakes."""

    OWNER, CALLER = 1, 2

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.flying: list[tuple[int, int, Message, int]] = []
        self.owner = self.worker("owner", self.OWNER)
        self.caller = self.worker("caller", self.CALLER)
        self.ref = self.caller.create(self.OWNER, "owner", [], how="sent")
        self.deliver(Request)
        self.deliver(Accepted)

    def worker(self, name: str, incarnation: int) -> SimWorker:
        def send(source: int, what: Send | Follow | Answer) -> None:
            self.flying.append((source, what.to, what.message, what.call_id))

        worker = SimWorker(name, incarnation, Machines(), send, self.oracle, Random(1), False)
        worker.patience = 1.0
        return worker

    @property
    def kinds(self) -> list[type[Message]]:
        return [type(message) for _, _, message, _ in self.flying]

    def deliver(self, kind: type[Message]) -> Message:
        source, target, message, call_id = self.flying.pop(self.kinds.index(kind))
        worker = self.owner if target == self.OWNER else self.caller
        worker.receive(source, message, call_id)
        self.oracle.check()
        assert self.oracle.violations == []
        return message

    def end(self) -> None:
        while self.flying:
            self.deliver(self.kinds[0])
        self.oracle.check_end()
        assert self.oracle.violations == []


def test_call_keeps_the_callees_value_until_it_is_answered():  # REF-1, REF-2
    stage = Stage()
    stage.caller.call(stage.OWNER, [stage.ref], how="sent")
    stage.caller.discard(stage.ref)
    assert stage.kinds == [Request]
    assert stage.caller.refs.statistics()["pinned_transfers"] == 0
    stage.deliver(Request)
    assert stage.kinds == []
    [task] = stage.owner.tasks
    assert stage.owner.handles == {stage.ref: 1}
    stage.owner.finish(task, [], fails=False)
    stage.deliver(Reply)
    assert stage.kinds == [Release]
    stage.deliver(Release)
    assert stage.owner.refs.owns(stage.ref.ref)
    stage.owner.discard(stage.ref)
    assert not stage.owner.refs.owns(stage.ref.ref)
    stage.end()


def test_abandoned_call_that_its_release_overtook_is_refused():  # REF-2, CALL-3
    stage = Stage()
    stage.caller.call(stage.OWNER, [stage.ref], how="sent")
    stage.caller.discard(stage.ref)
    stage.caller.abandon(stage.OWNER, 2)
    assert stage.kinds == [Request, Cancel, Release]
    stage.deliver(Release)
    assert not stage.owner.refs.owns(stage.ref.ref)
    stage.deliver(Request)
    assert stage.owner.tasks == []
    assert isinstance(stage.deliver(Failure), Failure)
    assert list(stage.caller.outgoing[stage.OWNER].abandoned()) == []
    stage.end()


def test_abandoned_call_whose_future_never_completes_is_closed():  # CALL-3
    stage = Stage()
    stage.caller.call(stage.OWNER, [stage.ref], how="sent")
    stage.deliver(Request)
    (task,) = stage.owner.tasks
    task.is_deferred = True
    stage.caller.abandon(stage.OWNER, 2)
    stage.deliver(Cancel)
    assert len(stage.owner.machine.calls_with(task.caller).incoming) == 0
    stage.deliver(Failure)
    assert list(stage.caller.outgoing[stage.OWNER].abandoned()) == []
    stage.owner.finish(task, [], fails=False)  # it completes late
    assert stage.kinds == []
    stage.owner.discard(stage.ref)
    stage.caller.discard(stage.ref)
    stage.end()


def test_abandoned_remote_call_keeps_the_references_that_it_carries():  # REF-1
    stage = Stage()
    made = stage.caller.create(stage.OWNER, "owner", [stage.ref], how="sent")
    stage.caller.discard(stage.ref)
    stage.caller.abandon(stage.OWNER, 2)
    assert stage.kinds == [Request, Cancel, Pinned]
    stage.deliver(Request)
    assert stage.owner.handles == {stage.ref: 1}
    stage.deliver(Accepted)
    assert stage.kinds == [Cancel, Pinned, Release]
    stage.owner.discard(stage.ref)
    stage.caller.discard(made)
    stage.end()


def test_dropping_a_reference_that_an_open_call_carries_is_a_violation():  # REF-1
    stage = Stage()
    stage.caller.call(stage.OWNER, [stage.ref], how="sent")
    stage.oracle.dropped(stage.OWNER, stage.ref.ref)
    del stage.caller.handles[stage.ref]
    stage.oracle.check()
    assert any("carries" in violation.text for violation in stage.oracle.violations)
    stage.oracle.violations.clear()
    stage.caller.abandon(stage.OWNER, 2)
    stage.oracle.check()
    assert not any("carries" in violation.text for violation in stage.oracle.violations)


# The command line.


def test_command_line_sums_up_and_succeeds():
    result = CliRunner().invoke(main, ["--schedules", "20"])
    assert result.exit_code == 0
    assert result.output.startswith("20 schedules, ")
    assert " 0 with violations" in result.output


def test_command_line_fails_and_says_how_to_replay():
    result = CliRunner().invoke(main, ["--schedules", "50", "--plant", "does-not-pin"])
    assert result.exit_code == 1
    assert "-m simulator.sim --replay --seed" in result.output
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


@pytest.mark.parametrize(
    ("protocol", "schedules", "first"),
    [
        # It ends once all are reached; from the given first schedule on that takes the fewest.
        ("calls", 3000, 894),
        ("backward", 3000, 2172),
        ("connecting", 500, 342),
        ("termination", 1000, 0),
        ("directory", 2000, 1143),
        ("supervision", 2000, 41),
    ],
)
def test_schedules_reach_every_line_of_the_machines(protocol, schedules, first, capsys):
    assert cover(schedules, first, Chosen(protocol)) == 0, capsys.readouterr().out


def test_lines_that_no_schedule_reaches_are_printed(capsys):
    assert cover(1, 0, Chosen()) == 1
    assert "refs.py:" in capsys.readouterr().out


def test_log_has_the_fields_of_a_message_that_matter():
    message = Request("f", creates=b"\2", references=(Reference(1, b"\3", 1, "w0", 0),))
    assert told(message) == "Request(function=f, creates=2, references=[1.3 of w0])"
    assert told(TransferKey(2, 7, True)) == "answer 7 of 2"
    assert told([RefId(1, b"\2"), "x"]) == "[1.2, x]"
