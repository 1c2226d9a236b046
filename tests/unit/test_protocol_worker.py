"""The rules that join calls and references, by hand; the simulator tries the rest."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from farcall.ids import RefId, next_incarnation
from farcall.protocol.instructions import (
    Answer,
    Drop,
    Follow,
    Instruction,
    Send,
    TransferKey,
)
from farcall.protocol.worker import WorkerMachine
from farcall.wire.messages import (
    Accepted,
    Cancel,
    Failure,
    Message,
    Pinned,
    Received,
    Reference,
    Register,
    Reply,
    Request,
)

CALLER, OWNER, THIRD = 1, 2, 3
Machine = WorkerMachine["Call", str]


class Call(NamedTuple):
    created: RefId | None = None
    is_noted: bool = False
    sent: bool = True
    cancelled: bool = False


class Creation(NamedTuple):
    """A `remote()` call that was begun."""

    machine: Machine
    ref: RefId
    call_id: int
    call: Call


def creation(*, sent: bool = True) -> Creation:
    machine: Machine = WorkerMachine(CALLER)
    ref = machine.refs.mint()
    machine.refs.create(ref, OWNER, "owner")
    call = Call(ref, True, sent)
    return Creation(machine, ref, machine.calls_with(OWNER).outgoing.begin(call), call)


def reference(ref: RefId, owner: int) -> Reference:
    return Reference(ref.minted_by, ref.number, owner, "owner", 0)


def answer(made: Creation, message: Accepted | Reply | Failure) -> bool:
    call = made.machine.calls_with(OWNER).outgoing.outcome(made.call_id)
    return made.machine.answered(OWNER, made.call_id, call, message)


def kinds(instructions: list[Instruction]) -> list[tuple[type, type[Message]]]:
    return [
        (type(one), type(one.message))
        for one in instructions
        if isinstance(one, Send | Follow | Answer)
    ]


def test_reference_in_the_making_goes_to_its_owner_only():  # WRK-1
    made = creation()
    assert made.machine.unconfirmed([made.ref], OWNER) == []
    assert made.machine.unconfirmed([made.ref], THIRD) == [made.ref]
    assert made.machine.unconfirmed([made.ref], 0) == [made.ref]
    assert answer(made, Accepted()) is False
    assert made.machine.unconfirmed([made.ref], THIRD) == []


@pytest.mark.parametrize(
    ("owners", "creates", "pins"),
    [
        ((), False, False),
        ((OWNER,), False, False),
        ((OWNER, OWNER), False, False),
        ((OWNER, THIRD), False, True),
        ((CALLER,), False, True),
        ((), True, True),
        ((OWNER,), True, True),
    ],
)
def test_the_pins_of_a_call(owners, creates, pins):  # WRK-2
    references = [reference(RefId(owner, b"1"), owner) for owner in owners]
    assert WorkerMachine.needs_pins(references, OWNER, creates=creates) is pins


def test_owner_is_asked_when_the_call_is_closed():  # WRK-3
    made = creation()
    assert made.machine.abandon(OWNER, made.call_id, made.call)
    assert kinds(made.machine.take()) == [(Follow, Cancel), (Follow, Pinned)]
    assert answer(made, Failure("Cancelled", "", "")) is False
    assert kinds(made.machine.take()) == [(Send, Register)]


def test_creation_that_was_accepted_after_all_is_confirmed():  # WRK-3
    made = creation()
    made.machine.abandon(OWNER, made.call_id, made.call)
    made.machine.take()
    answer(made, Accepted())
    assert made.machine.unconfirmed([made.ref], THIRD) == []
    assert made.machine.take() == []


def test_call_that_is_given_up_before_it_is_sent():
    made = creation(sent=False)
    assert made.machine.abandon(OWNER, made.call_id, made.call)
    assert made.machine.take() == []
    made.machine.sent_late(OWNER, made.call_id, made.call)
    assert kinds(made.machine.take()) == [(Follow, Cancel), (Follow, Pinned)]


def test_call_that_is_never_sent():
    made = creation(sent=False)
    assert made.machine.retract(OWNER, made.call_id, made.call, "the link broke")
    assert made.machine.refs.void_cause(made.ref, OWNER) == "the link broke"
    assert made.machine.take() == []
    assert made.machine.calls_with(OWNER).outgoing.begin(Call()) == made.call_id  # CALL-4


def test_references_in_an_answer_that_comes_too_late():  # WRK-4
    machine: Machine = WorkerMachine(CALLER)
    call_id = machine.calls_with(OWNER).outgoing.begin(Call())
    assert machine.calls_with(OWNER).outgoing.outcome(call_id) is not None  # timed out, say
    late = Reply((reference(RefId(OWNER, b"1"), OWNER),))
    assert machine.answered(OWNER, call_id, None, late) is False
    assert kinds(machine.take()) == [(Send, Received)]


@pytest.mark.parametrize("carries", [False, True])
def test_answer_of_a_call_that_is_not_noted_changes_nothing(carries):
    machine: Machine = WorkerMachine(CALLER)
    outgoing = machine.calls_with(OWNER).outgoing
    call_id = outgoing.begin(Call())
    references = (reference(RefId(OWNER, b"1"), OWNER),) if carries else ()
    before = machine.refs.statistics()
    arrives = machine.answered(OWNER, call_id, outgoing.outcome(call_id), Reply(references))
    assert arrives is carries
    assert machine.take() == []
    assert machine.refs.statistics() == before


def test_request_that_makes_a_reference_is_accepted_at_once():
    machine: Machine = WorkerMachine(OWNER)
    assert machine.calls_with(CALLER).incoming.request(1, "call")
    assert machine.admit(CALLER, 1, (), RefId(CALLER, b"1"), 1)
    assert kinds(machine.take()) == [(Answer, Accepted)]
    assert machine.refs.owns(RefId(CALLER, b"1"))
    assert len(machine.calls_with(CALLER).incoming) == 0


def test_request_with_references_that_live_elsewhere_has_to_wait():
    machine: Machine = WorkerMachine(OWNER)
    machine.calls_with(CALLER).incoming.request(1, "call")
    request = Request("f", references=(reference(RefId(THIRD, b"1"), THIRD),))
    assert machine.admit(CALLER, 1, request.references) is False
    assert machine.refs.statistics()["held"] == 0  # not before `arrive`


def test_cancelled_call_gives_its_record_while_it_runs_and_is_answered_else():
    machine: Machine = WorkerMachine(OWNER)
    machine.calls_with(CALLER).incoming.request(1, "call")
    assert machine.cancelled(CALLER, 1, waits=False) == "call"
    assert machine.take() == []
    assert machine.answer(CALLER, 1, ())
    assert machine.cancelled(CALLER, 1, waits=True) is None
    assert machine.take() == []  # the answer is on its way, and this one could be faster
    assert machine.cancelled(CALLER, 1, waits=False) is None
    assert kinds(machine.take()) == [(Answer, Failure)]
    assert machine.cancelled(CALLER, 2, waits=True) is None
    assert kinds(machine.take()) == [(Answer, Failure)]  # it will never run


def test_the_lost_are_not_heard_and_nothing_is_sent_to_them():  # WRK-5
    machine: Machine = WorkerMachine(OWNER)
    machine.calls_with(CALLER).incoming.request(1, "call")
    machine.admit(CALLER, 1, (), RefId(CALLER, b"1"), 1)
    machine.calls_with(CALLER).incoming.request(2, "other call")
    call = Call()
    machine.calls_with(CALLER).outgoing.begin(call)
    assert machine.on_peer_lost(CALLER, "it died") == ([call], ["other call"])
    assert machine.take() == [Drop(RefId(CALLER, b"1"))]  # but no ACCEPTED
    assert not machine.calls_with(CALLER).incoming.request(3, "late call")
    machine.on_message(CALLER, Register(((CALLER, b"1", 2),)), 0)
    assert machine.cancelled(CALLER, 2, waits=False) is None
    assert machine.take() == []


def test_calls_with_the_lost_are_shut_also_if_there_were_none():  # WRK-5
    machine: Machine = WorkerMachine(OWNER)
    assert machine.on_peer_lost(CALLER, "it is not in the group any more") == ([], [])
    assert not machine.calls_with(CALLER).incoming.request(1, "call")
    machine.discard([CALLER])
    assert machine.calls_with(CALLER).incoming.request(1, "call")


def test_calls_of_the_forgotten_are_still_counted():
    machine: Machine = WorkerMachine(OWNER)
    machine.calls_with(CALLER).incoming.request(1, "call")
    machine.on_peer_lost(CALLER, "it died")
    machine.discard([CALLER])
    assert machine.received_before == 1


# Meeting again.


def lost_and_met() -> tuple[Machine, int]:
    """Return a machine that has lost OWNER, and what OWNER is to it from now on."""
    machine: Machine = WorkerMachine(CALLER)
    machine.on_peer_lost(OWNER, "silent")
    again = next_incarnation(OWNER)
    machine.meet(again)
    return machine, again


def test_a_worker_that_is_met_again_is_another_incarnation():  # WRK-6
    machine, again = lost_and_met()
    assert machine.is_lost(OWNER)
    assert not machine.is_lost(again)
    assert machine.calls_with(OWNER).incoming.request(1, "late") is False
    assert machine.calls_with(again).incoming.request(1, "new") is True


def test_a_message_of_a_third_worker_means_the_incarnation_of_now():  # WRK-6
    machine, again = lost_and_met()
    ref = RefId(OWNER, b"1")
    (local,) = machine.localized((reference(ref, OWNER),))
    assert local.owner == again
    machine.refs.arrive(TransferKey(THIRD, 1, False), [local])
    assert machine.take() == [Send(again, Register(((OWNER, b"1", 1),)))]


def test_a_creation_belongs_to_the_incarnation_with_which_its_caller_began():
    machine: Machine = WorkerMachine(OWNER)
    machine.on_peer_lost(CALLER, "silent")
    again = next_incarnation(CALLER)
    machine.meet(again)
    created = machine.created_by(again, Request("f", creates=b"1", sequence=1))
    assert machine.admit(again, 1, (), created, 1)
    assert machine.refs.owns(RefId(CALLER, b"1"))


def test_a_meeting_before_the_last_changes_nothing():
    machine, again = lost_and_met()
    machine.meet(OWNER)
    (local,) = machine.localized((reference(RefId(OWNER, b"1"), OWNER),))
    assert local.owner == again


def test_a_worker_that_was_met_again_and_is_forgotten_begins_at_the_start():
    machine, again = lost_and_met()
    machine.on_peer_lost(again, "silent")
    machine.discard([OWNER, again])
    (local,) = machine.localized((reference(RefId(OWNER, b"1"), OWNER),))
    assert local.owner == OWNER
    assert not machine.is_lost(OWNER)
