"""A backward pass at one worker: rows of its state table that simulations hardly reach."""

from __future__ import annotations

import pytest

from farcall.protocol.credit import WHOLE
from farcall.protocol.pass_instructions import (
    AnswerAsker,
    EndPass,
    FailUnused,
    KeepLeaves,
    ReturnCredit,
    RunSource,
    SendGradients,
    StopPass,
    TellAll,
    TellRoot,
)
from farcall.protocol.passes import ROOT, PassMachine, PassState, UnexpectedGradient


def machine_at(me: str, *, is_fast: bool = False, averages: bool = False) -> PassMachine:
    """Return the machine of a pass that began at "root"."""
    return PassMachine(me, "root", is_fast=is_fast, averages=averages)


def alone_at(me: str) -> PassMachine:
    """Return a pass at a worker whose sources share nothing."""
    machine = machine_at(me)
    machine.explored(False)
    return machine


def test_loss_of_the_root_stops_the_pass_and_tells_no_worker():  # BWD-5
    machine = alone_at("here")
    assert machine.on_peer_lost(20, "root", "the root died") == [StopPass()]
    assert machine.error == "the root died"


def test_loss_of_a_worker_that_was_sent_gradients_fails_the_pass():  # BWD-5
    machine = alone_at("here")
    machine.arrive(1, 3)
    machine.computed(1, {"receive": 20})
    assert machine.on_peer_lost(30, "there", "died") == []
    assert machine.on_peer_lost(20, "there", "died") == [StopPass(), TellRoot()]


def test_last_message_takes_all_of_the_share_but_not_at_the_root():  # BWD-3
    machine, root = alone_at("here"), alone_at("root")
    machine.arrive(1, 3)
    sent = [SendGradients("a", 4), SendGradients("b", 4)]
    assert machine.computed(1, {"a": 20, "b": 30}) == [KeepLeaves(), *sent]
    assert machine.ran(1) == []
    root.arrive(ROOT, WHOLE)
    sent = [SendGradients("a", 1), SendGradients("b", 2)]
    assert root.computed(ROOT, {"a": 20, "b": 30}) == [*sent, KeepLeaves()]
    assert root.ran(ROOT) == []
    assert root.credit_returned("there", 1, -1) == []
    assert root.credit_returned("elsewhere", 2, -1) == [EndPass(None)]


def test_fast_mode_gives_back_a_share_of_each_source_and_says_what_is_missing():  # BWD-7
    machine = machine_at("here", is_fast=True)
    machine.explored_all(False, {1: [("receive", 0)], 2: []})
    assert machine.arrive(1, 3) == [RunSource(1)]
    assert machine.computed(1, {"receive": 20})[-1] == SendGradients("receive", 4)
    assert machine.ran(1) == [ReturnCredit(4, 1)]


def test_root_believes_the_smallest_number_that_a_worker_said_is_missing():
    root = machine_at("root", is_fast=True)
    root.explored_all(False, {ROOT: [("receive", 0)]})
    root.arrive(ROOT, WHOLE)
    root.computed(ROOT, {"receive": 20})
    root.ran(ROOT)
    assert root.credit_returned("here", 2, 1) == []
    assert root.credit_returned("here", 3, 2) == []  # said before, arrives later
    assert root.credit_returned("there", 3, 0) == [FailUnused({"here": 1})]


def test_worker_that_averages_must_know_its_last_source_unless_it_has_only_the_roots():
    only_roots, others = machine_at("root", averages=True), machine_at("root", averages=True)
    only_roots.explored(False, has_sent=False)
    others.explored(False, has_sent=True)
    assert (only_roots.state, others.state) == (PassState.ALONE, PassState.WAITING)
    assert others.needs_survey


def test_second_gradient_of_a_source_is_refused():  # BWD-2
    machine = alone_at("here")
    machine.arrive(1, 3)
    with pytest.raises(UnexpectedGradient):
        machine.arrive(1, 3)


def test_gradient_of_a_source_that_is_not_live_is_refused_though_it_came_early():  # BWD-2
    machine = machine_at("here")
    machine.explored(True)
    machine.arrive(1, 3)
    with pytest.raises(UnexpectedGradient):
        machine.begin(False)


def test_only_the_root_takes_shares_back_and_asks_for_causes():
    machine = alone_at("here")
    assert machine.credit_returned("there", WHOLE, -1) == []
    assert machine.pass_failed("there") == []


def test_pass_that_is_over_can_neither_fail_nor_be_aborted():
    root = alone_at("root")
    root.arrive(ROOT, WHOLE)
    root.computed(ROOT, {})
    assert root.ran(ROOT) == [EndPass(None)]
    for event in (root.fail, root.stop, root.abort):
        assert event("late") == []
    assert root.on_peer_lost(20, "there", "late") == []


def test_an_asker_gets_the_error_of_a_failed_pass():
    root = alone_at("root")
    assert root.survey("asker") != []
    assert root.fail("why") == [StopPass(), AnswerAsker("asker", "why"), EndPass("why")]
    assert root.survey("later") == [AnswerAsker("later", "why")]
    assert root.reached(1, [0], [("receive", 0)], "much later") == [
        AnswerAsker("much later", "why")
    ]


def test_failure_is_told_to_all_once():  # BWD-6
    root = alone_at("root")
    root.fail("why")
    assert root.abort("why") == [TellAll()]
    assert root.abort("why") == []
