"""Leaving together, step by step. Schedules are in `test_termination_sim.py`."""

from __future__ import annotations

import pytest

from farcall.protocol.termination import LONGEST_QUESTION, Silence, TerminationDetector
from farcall.wire.messages import Dismiss, Drain, Drained

ONE, TWO, THREE = (0, 11), (1, 22), (2, 33)


def leaving(me: tuple[int, int], *members: tuple[int, int]) -> TerminationDetector:
    detector = TerminationDetector(me[1], list(members))
    detector.idle(1)
    return detector


def test_live_worker_with_the_lowest_id_leads() -> None:
    detector = TerminationDetector(22, [THREE, TWO, ONE])
    assert detector.leader == 11
    detector.on_peer_lost(11)
    assert detector.leader == 22


def test_two_equal_rounds_are_needed() -> None:
    leader = leaving(ONE, ONE, TWO)
    assert leader.ready() == [(11, Drain(1)), (22, Drain(1))]
    assert leader.missing == [11, 22]
    leader.on_drained(11, Drained(1, 1))
    second = leader.on_drained(22, Drained(1, 4))
    assert second == [(11, Drain(2)), (22, Drain(2))]
    leader.on_drained(11, Drained(2, 1))
    third = leader.on_drained(22, Drained(2, 5))  # it was active in between
    assert third == [(11, Drain(3)), (22, Drain(3))]
    leader.on_drained(11, Drained(3, 1))
    assert not leader.dismissed
    assert leader.on_drained(22, Drained(3, 5)) == [(22, Dismiss())]
    assert leader.dismissed


def test_answer_waits_for_readiness_and_idleness() -> None:
    detector = TerminationDetector(22, [ONE, TWO])
    assert detector.on_drain(11, Drain(1)) == []
    assert detector.ready() == []
    assert detector.idle(3) == [(11, Drained(1, 3))]
    detector.busy()
    assert detector.on_drain(11, Drain(2)) == []
    assert detector.idle(4) == [(11, Drained(2, 4))]


def test_answers_to_old_rounds_are_ignored() -> None:
    leader = leaving(ONE, ONE, TWO)
    leader.ready()
    assert leader.on_drained(22, Drained(7, 1)) == []
    assert leader.missing == [11, 22]


def test_late_question_of_a_dead_leader_does_not_push_out_its_successors() -> None:
    detector = TerminationDetector(33, [ONE, TWO, THREE])
    detector.ready()
    detector.on_drain(22, Drain(1))  # it has noticed the death of 11
    detector.on_drain(11, Drain(1))  # its last words, read after
    assert (22, Drained(1, 1)) in detector.idle(1)


def test_successor_asks_everybody_again() -> None:
    second = leaving(TWO, ONE, TWO, THREE)
    assert second.ready() == []
    assert second.on_peer_lost(11) == [(22, Drain(1)), (33, Drain(1))]


def test_last_one_dismisses_itself() -> None:
    last = leaving(ONE, ONE, TWO)
    last.ready()
    last.on_drained(11, Drained(1, 1))
    assert last.on_peer_lost(22) == [(11, Drain(2))]
    assert last.on_drained(11, Drained(2, 1)) == []
    assert last.dismissed


def test_only_its_leader_dismisses_a_worker() -> None:
    """Seed 3753: one that was given up leads those that it takes for the living."""
    detector = leaving(THREE, ONE, TWO, THREE)
    detector.ready()
    detector.on_dismiss(22)
    assert not detector.dismissed
    detector.on_peer_lost(11)
    detector.on_dismiss(22)
    assert detector.dismissed


# Silence.


@pytest.mark.parametrize("bound", [1.0, 5.0, 30.0, 3600.0])
def test_silence_for_the_bound_is_a_loss(bound: float) -> None:  # DEP-4
    silence = Silence(bound)
    assert silence.question <= min(bound, LONGEST_QUESTION)
    seconds = 0.0
    while not silence.unanswered(11, silence.question):
        seconds += silence.question
        assert seconds < bound
    assert seconds + silence.question >= bound


def test_an_answer_ends_silence() -> None:  # DEP-3
    silence = Silence(30.0)
    for _ in range(20):
        assert not silence.unanswered(11, 20.0 / 4)
        assert not silence.unanswered(11, 20.0 / 4)
        silence.answered(11)


def test_standstills_of_the_asker_do_not_count() -> None:  # DEP-3
    silence = Silence(30.0)
    assert not any(silence.unanswered(11, 60.0) for _ in range(20))


def test_without_a_bound_no_worker_is_given_up() -> None:
    silence = Silence(0.0)
    assert silence.question == LONGEST_QUESTION
    assert not any(silence.unanswered(11, silence.question) for _ in range(1000))
