"""The call machines, transition by transition, as the tables in `farcall.protocol.calls` say."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interrupts import Interrupt, needs_its_bytecode

from farcall.protocol.calls import CancelResult, Incoming, Outgoing

# The caller.


def test_calls_to_a_peer_are_numbered_from_one():
    outgoing: Outgoing[str] = Outgoing()
    assert [outgoing.begin("a"), outgoing.begin("b"), outgoing.begin("c")] == [1, 2, 3]
    assert len(outgoing) == 3
    assert list(outgoing.open_ids()) == [1, 2, 3]


def test_outcome_of_open_call_yields_its_record_once():  # CALL-1
    outgoing: Outgoing[str] = Outgoing()
    call = outgoing.begin("record")
    assert not outgoing.is_closed(call)
    assert outgoing.outcome(call) == "record"
    assert outgoing.is_closed(call)
    assert outgoing.outcome(call) is None
    assert len(outgoing) == 0


def test_abandoned_call_yields_its_record_once_and_waits_for_the_answer():  # CALL-1, CALL-3
    outgoing: Outgoing[str] = Outgoing()
    call = outgoing.begin("record")
    assert outgoing.abandon(call, "record")
    assert not outgoing.abandon(call, "record")
    assert outgoing.is_closed(call)
    assert list(outgoing.abandoned()) == [call]
    assert outgoing.outcome(call) is None
    assert list(outgoing.abandoned()) == []


def test_call_that_has_ended_can_not_be_abandoned():
    outgoing: Outgoing[str] = Outgoing()
    call = outgoing.begin("record")
    outgoing.outcome(call)
    assert not outgoing.abandon(call, "record")
    assert list(outgoing.abandoned()) == []


def test_lost_peer_ends_open_calls_and_forgets_abandoned_ones():
    outgoing: Outgoing[str] = Outgoing()
    outgoing.begin("open")
    outgoing.abandon(outgoing.begin("abandoned"), "abandoned")
    assert outgoing.take_all() == ["open"]
    assert outgoing.take_all() == []
    assert list(outgoing.abandoned()) == []
    assert outgoing.outcome(1) is None


@pytest.mark.parametrize("gives_up_first", [False, True])
def test_the_next_call_takes_the_number_of_a_request_that_was_not_sent(gives_up_first):  # CALL-4
    outgoing: Outgoing[str] = Outgoing()
    call = outgoing.begin("unsent")
    if gives_up_first:  # its deadline passed while it was about to be sent
        assert outgoing.abandon(call, "unsent")
    assert outgoing.retract(call, "unsent") is not gives_up_first
    assert list(outgoing.abandoned()) == []
    assert outgoing.begin("next") == call
    assert outgoing.begin("after it") == call + 1


def test_a_caller_that_gives_up_late_does_not_end_the_next_call_of_that_number():  # CALL-1
    outgoing: Outgoing[str] = Outgoing()
    outgoing.retract(outgoing.begin("unsent"), "unsent")
    call = outgoing.begin("next")
    assert not outgoing.abandon(call, "unsent")
    assert not outgoing.retract(call, "unsent")
    assert outgoing.outcome(call) == "next"


@needs_its_bytecode
@pytest.mark.parametrize("reused", [False, True])
def test_a_signal_while_a_call_is_begun_loses_no_number(reused: bool):  # CALL-4
    for number in itertools.count(1):
        outgoing: Outgoing[str] = Outgoing()
        if reused:
            outgoing.retract(outgoing.begin("unsent"), "unsent")
        interrupt = Interrupt(number)
        interrupt.run(functools.partial(outgoing.begin, "interrupted"))
        outgoing.begin("after it")
        assert set(outgoing.open_ids()) == set(range(1, 1 + len(outgoing))), interrupt.where
        if not interrupt.where:
            break


# The callee.


def test_request_runs_once_however_often_it_arrives():  # CALL-2
    incoming: Incoming[str] = Incoming()
    assert incoming.request(1, "task")
    assert not incoming.request(1, "task")
    assert incoming.finish(1)
    assert not incoming.request(1, "task")


def test_cancelled_before_it_arrived_never_runs():  # CALL-3
    incoming: Incoming[str] = Incoming()
    assert incoming.cancel(1) == (CancelResult.UNSEEN, None)
    assert not incoming.request(1, "task")
    assert len(incoming) == 0


def test_cancel_of_a_running_call_yields_its_record_and_lets_it_end():
    incoming: Incoming[str] = Incoming()
    incoming.request(1, "task")
    assert incoming.cancel(1) == (CancelResult.RUNNING, "task")
    assert incoming.cancel(1) == (CancelResult.RUNNING, "task")
    assert incoming.finish(1)


def test_cancel_of_a_finished_call_finds_that():
    incoming: Incoming[str] = Incoming()
    incoming.request(1, "task")
    incoming.finish(1)
    assert incoming.cancel(1) == (CancelResult.FINISHED, None)
    assert incoming.cancel(1) == (CancelResult.FINISHED, None)


def test_the_ids_tell_how_many_calls_were_received():
    incoming: Incoming[str] = Incoming()
    for call_id in (1, 2, 5):  # 3 and 4 are on the way
        incoming.request(call_id, "call")
    incoming.request(2, "again")
    assert incoming.received == 3
    incoming.cancel(4)  # it will never run
    incoming.request(3, "call")
    incoming.finish(1)
    assert incoming.received == 4
    incoming.take_all()
    incoming.take_all()
    assert incoming.received == 4


def test_outcome_is_not_sent_to_a_lost_caller():
    incoming: Incoming[str] = Incoming()
    incoming.request(1, "one")
    incoming.request(2, "two")
    incoming.finish(1)
    assert incoming.take_all() == ["two"]
    assert not incoming.finish(2)


def test_cancelling_an_unsent_call_closes_the_gap_in_the_callees_memory():
    incoming: Incoming[str] = Incoming()
    for call in range(2, 100):
        incoming.request(call, "task")
    assert len(incoming._seen_above) == 98
    incoming.cancel(1)
    assert not incoming._seen_above


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans())))
def test_any_order_of_requests_and_cancels_runs_each_call_at_most_once(events):
    incoming: Incoming[str] = Incoming()
    seen: set[int] = set()
    for call, is_request in events:
        if is_request:
            assert incoming.request(call, "task") is (call not in seen)  # CALL-2
        else:
            incoming.cancel(call)
        seen.add(call)
        assert all(incoming.has_seen(c) is (c in seen) for c in range(1, 13))


@given(st.lists(st.tuples(st.sampled_from(["outcome", "abandon", "retract"]), st.integers(1, 6))))
def test_every_call_has_exactly_one_end_in_any_order_of_events(events):  # CALL-1
    outgoing: Outgoing[int] = Outgoing()
    for number in range(1, 7):
        outgoing.begin(number)
    ends = []
    for event, call in events:
        if event == "outcome":
            ends.append(outgoing.outcome(call))
        else:
            ends.append(call if getattr(outgoing, event)(call, call) else None)
    ends = [end for end in [*ends, *outgoing.take_all()] if end is not None]
    assert sorted(ends) == [1, 2, 3, 4, 5, 6]
