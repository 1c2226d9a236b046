"""The machines of the directory and of questions to the store, by hand."""

from __future__ import annotations

import msgspec
import pytest
from simulator.directory.world import Record

from farcall.ids import MAX_MEETINGS, Worker, WorkerInfo, nth_incarnation
from farcall.protocol.directory import DISCARD_SECONDS, DirectoryMachine, Found, Standing, Verdict
from farcall.protocol.lookup import MOST_STUCK, STUCK_SECONDS, LookupMachine, Round, Step

W1 = Worker("w1", 1, 11, ("tcp:1",), pid=5)
AGAIN = nth_incarnation(W1.incarnation, 1)
SUCCESSOR = Worker("w1", 1, 13, ("tcp:2",), pid=6)
Machine = DirectoryMachine[Record]


@pytest.fixture
def machine() -> Machine:
    """Return a machine of a group where workers come and go."""
    return DirectoryMachine(Record, is_open=True)


def note_loss(machine: Machine, record: Record, now: float = 0.0) -> list[int]:
    record.loss_cause = "the link ended"
    return machine.on_peer_lost(record, now)


@pytest.mark.parametrize("key", ["w1", 1, WorkerInfo("w1", 1)])
def test_the_standing_of_a_key(machine: Machine, key: str | int | WorkerInfo) -> None:  # DIR-4
    assert machine.resolve(key) == Found(Standing.ASK, None)
    assert machine.resolve(key, asked=True) == Found(Standing.UNKNOWN, None)
    record = machine.add(W1)
    assert machine.resolve(key) == Found(Standing.KNOWN, record)
    assert machine.known(key) is record
    note_loss(machine, record)
    assert machine.resolve(key) == Found(Standing.ASK, record)
    assert machine.resolve(key, asked=True) == Found(Standing.LOST, record)
    assert machine.known(key) is None


def test_no_member_is_asked_in_a_group_of_fixed_size() -> None:
    fixed: Machine = DirectoryMachine(Record, is_open=False)
    assert fixed.resolve("w1").standing is Standing.UNKNOWN
    note_loss(fixed, fixed.add(W1))
    assert fixed.resolve("w1").standing is Standing.LOST


def test_dir1_late_word_of_a_former_holder_takes_no_name_for_long(machine: Machine) -> None:
    new = machine.add(SUCCESSOR)
    old = machine.add(W1)
    assert machine.known("w1") is old
    note_loss(machine, old)
    assert machine.known("w1") is machine.known(1) is new
    assert machine.add(W1) is old
    assert machine.known("w1") is new


def test_a_worker_that_has_a_successor_is_not_current(machine: Machine) -> None:
    old = machine.add(W1)
    note_loss(machine, old)
    assert machine.is_current(old)
    machine.add(SUCCESSOR)
    assert not machine.is_current(old)


def test_dir1_a_lost_worker_is_current_though_an_older_holder_seems_to_live(
    machine: Machine,
) -> None:
    machine.add(W1)
    new = machine.add(SUCCESSOR)
    note_loss(machine, new)
    assert machine.is_current(new)


def test_dir2_handshake_in_a_later_meeting_begins_anew(machine: Machine) -> None:
    machine.add(W1)
    assert machine.verdict(W1.incarnation, 0) is Verdict.WELCOME
    assert machine.verdict(W1.incarnation, 1) is Verdict.ANEW
    assert machine.meet_again(W1.incarnation, 1, 0.0)
    assert machine.verdict(W1.incarnation, 0) is Verdict.GIVEN_UP
    assert machine.verdict(W1.incarnation, 1) is Verdict.WELCOME
    assert machine.verdict(W1.incarnation, MAX_MEETINGS) is Verdict.TOO_OFTEN


def test_dir2_unknown_worker_may_remember_us(machine: Machine) -> None:
    assert machine.verdict(W1.incarnation, 1) is Verdict.ANEW
    assert not machine.meet_again(W1.incarnation, 1, 0.0)
    assert machine.meeting(W1.incarnation) == 1
    assert machine.verdict(W1.incarnation, 1) is Verdict.WELCOME
    assert machine.add(W1).worker.incarnation == AGAIN


def test_dir3_link_of_an_earlier_meeting_brings_nothing(machine: Machine) -> None:
    machine.meet_again(W1.incarnation, 1, 0.0)
    assert machine.heard(W1) is None
    record = machine.heard(msgspec.structs.replace(W1, incarnation=AGAIN))
    assert record is machine.newest(W1.incarnation)


def test_dir3_number_of_a_meeting_counts_from_its_link_if_it_was_forgotten(
    machine: Machine,
) -> None:
    record = machine.heard(msgspec.structs.replace(W1, incarnation=AGAIN))
    assert machine.newest(W1.incarnation) is record
    assert machine.meeting(W1.incarnation) == 1


def test_a_worker_that_has_left_is_not_met_again(machine: Machine) -> None:
    record = machine.add(W1)
    record.left = "it has shut down"
    assert machine.verdict(W1.incarnation, 0) is Verdict.WELCOME
    note_loss(machine, record)
    assert machine.verdict(W1.incarnation, 1) is Verdict.LEFT


def test_dir5_dir6_the_lost_are_forgotten_here_and_then_everywhere(machine: Machine) -> None:
    note_loss(machine, machine.add(W1))
    other = machine.add(Worker("w2", 2, 15))
    assert note_loss(machine, other, DISCARD_SECONDS + 1) == []
    assert machine.parties() == [other]
    assert machine.meeting(W1.incarnation) == 1
    assert note_loss(machine, other, 2 * DISCARD_SECONDS + 2) == [W1.incarnation]
    assert machine.meeting(W1.incarnation) == 0


# Questions to the store.


class Query:
    def __init__(self, key: str | int) -> None:
        self.key = key


def test_look1_a_question_that_is_asked_already_is_waited_for() -> None:
    machine: LookupMachine[Query] = LookupMachine()
    first, second = Query("w1"), Query("w1")
    assert machine.ask(first) == (first, 0)
    assert machine.ask(second) == (first, None)
    assert machine.begins(first, 0, 0.0) is Step.ASK
    assert machine.ends(first, 0, found=True)
    assert machine.ask(second) == (second, 0)


def test_look2_look4_all_is_asked_anew_and_late_answers_do_not_count() -> None:
    machine: LookupMachine[Query] = LookupMachine()
    first, second = Query("w1"), Query("w2")
    machine.ask(first)
    machine.begins(first, 0, 0.0)
    machine.ask(second)
    assert machine.look(STUCK_SECONDS - 0.1) is None
    assert machine.look(STUCK_SECONDS) == Round(1, [first, second])
    assert machine.begins(first, 0, STUCK_SECONDS) is Step.DROP
    assert machine.begins(first, 1, STUCK_SECONDS) is Step.REOPEN
    assert not machine.ends(first, 0, found=True)
    assert machine.ends(first, 1, found=True)
    assert machine.begins(first, 1, STUCK_SECONDS) is Step.ASK


def test_look3_few_connections_are_stuck() -> None:
    machine: LookupMachine[Query] = LookupMachine()
    question = Query("w1")
    machine.ask(question)
    now = 0.0
    for connection in range(MOST_STUCK):
        machine.begins(question, connection, now)
        now += STUCK_SECONDS * 2**connection
        assert machine.look(now) == Round(connection + 1, [question])
    machine.begins(question, MOST_STUCK, now)
    now += STUCK_SECONDS * 2**MOST_STUCK
    assert machine.look(now) is None
    machine.ends(question, 0, found=None)
    assert machine.look(now) == Round(MOST_STUCK + 1, [question])


def test_look5_connection_is_made_anew_after_a_failure() -> None:
    machine: LookupMachine[Query] = LookupMachine()
    for found, step in ((None, Step.ASK), (None, Step.REOPEN), (True, Step.REOPEN)):
        question = Query("w1")
        machine.ask(question)
        assert machine.begins(question, 0, 0.0) is step
        machine.ends(question, 0, found=found)
    machine.ask(question)
    assert machine.begins(question, 0, 0.0) is Step.ASK


def test_look6_a_caller_that_joins_is_not_told_earlier_answers() -> None:
    machine: LookupMachine[Query] = LookupMachine()
    question = Query("w1")
    machine.ask(question)
    machine.ask(Query("w1"))  # before the store is asked
    machine.begins(question, 0, 0.0)
    assert machine.ends(question, 0, found=False)
    for found in (True, None):
        machine.ask(question)
        machine.begins(question, 0, 0.0)
        assert machine.ask(Query("w1")) == (question, None)
        assert not machine.ends(question, 0, found=False)
        machine.begins(question, 0, 0.0)
        assert machine.ends(question, 0, found=found)
