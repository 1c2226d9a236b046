"""Autograd contexts of one worker: rows of their state table that simulations hardly reach."""

from __future__ import annotations

import pytest

from farcall.ids import next_incarnation
from farcall.protocol.contexts import (
    CREATOR_SHIFT,
    LIVES,
    MOST_LIVES,
    Contexts,
    DropContext,
    ReportHeld,
    TellEnd,
    TellFailures,
)

ME, CREATOR, THIRD, FOURTH = 1, 2, 3, 4  # ids; an incarnation is ten times as much
CONTEXT = CREATOR << CREATOR_SHIFT | 5


@pytest.fixture
def contexts() -> Contexts[str]:
    """Return the contexts of a worker that got one, of another creator, from a third worker."""
    contexts: Contexts[str] = Contexts(ME, 0)
    assert contexts.enter(CONTEXT, 10 * THIRD, "content") == "content"
    return contexts


def note_loss(
    contexts: Contexts[str], id: int, *, is_replaced: bool = False, gone: tuple[int, ...] = ()
) -> list[object]:
    return list(
        contexts.on_peer_lost(
            10 * id,
            id,
            is_replaced=is_replaced,
            living=lambda each: None if each in gone else 10 * each,
        )
    )


REPORT = [ReportHeld(10 * CREATOR, CONTEXT), TellFailures(10 * CREATOR, CONTEXT, "content")]


def test_lost_giver_is_reported_to_the_creator(contexts):  # BWD-4
    assert note_loss(contexts, THIRD) == REPORT
    assert contexts.get(CONTEXT) == "content"


def test_creator_takes_the_place_of_a_lost_giver(contexts):  # BWD-4, BWD-6
    assert note_loss(contexts, THIRD) == REPORT
    assert contexts.known_to(CONTEXT) == (10 * CREATOR,)
    assert note_loss(contexts, CREATOR, is_replaced=True) == [DropContext(CONTEXT, "content")]


def test_failure_reaches_the_creator_though_the_only_giver_dies():  # BWD-6
    """Fail the pass before or after the death of its giver, which has told no other worker."""
    creator: Contexts[str] = Contexts(CREATOR, 0)
    assert [creator.next_id() for _ in range(5)][-1] == CONTEXT
    creator.create(CONTEXT, "content")
    creator.tell(CONTEXT, 10 * THIRD)
    worker: Contexts[str] = Contexts(ME, 0)
    worker.enter(CONTEXT, 10 * THIRD, "content")
    assert note_loss(creator, THIRD) == []
    report, before = note_loss(worker, THIRD)
    assert before == TellFailures(10 * CREATOR, CONTEXT, "content")
    assert creator.held(CONTEXT, 10 * ME) == [TellFailures(10 * ME, CONTEXT, "content")]
    assert report == ReportHeld(10 * CREATOR, CONTEXT)
    assert worker.known_to(CONTEXT) == (10 * CREATOR,)
    assert creator.known_to(CONTEXT) == (10 * ME,)


def test_lost_giver_ends_the_context_if_the_creator_is_gone(contexts):  # BWD-4
    contexts.tell(CONTEXT, 10 * FOURTH)
    told = TellEnd(10 * FOURTH, CONTEXT, 1)
    assert note_loss(contexts, THIRD, gone=(CREATOR,)) == [DropContext(CONTEXT, "content"), told]
    assert contexts.enter(CONTEXT, 10 * FOURTH, "again") is None


def test_lost_creator_ends_the_context_of_any_giver(contexts):  # BWD-4
    assert note_loss(contexts, CREATOR, gone=(CREATOR,)) == [DropContext(CONTEXT, "content")]


def test_loss_of_an_earlier_life_leaves_contexts_of_the_newer_one(contexts):
    assert note_loss(contexts, CREATOR, is_replaced=True) == []
    assert contexts.get(CONTEXT) == "content"


def test_loss_of_an_earlier_life_ends_its_contexts(contexts):  # BWD-4
    contexts.enter(CONTEXT, 10 * CREATOR, "content")
    assert note_loss(contexts, CREATOR, is_replaced=True) == [DropContext(CONTEXT, "content")]


def test_own_contexts_survive_the_loss_of_an_earlier_life_of_this_worker():
    contexts: Contexts[str] = Contexts(ME, 0)
    mine = contexts.next_id()
    contexts.create(mine, "mine")
    contexts.enter(mine, 10 * ME, "mine")  # it came back to us from there
    assert note_loss(contexts, ME, is_replaced=True) == []
    assert contexts.get(mine) == "mine"


def test_a_worker_that_reports_a_context_is_told_of_failed_passes_and_later_of_the_end():  # BWD-4
    contexts: Contexts[str] = Contexts(ME, 0)
    mine = contexts.next_id()
    contexts.create(mine, "mine")
    assert contexts.held(mine, 10 * THIRD) == [TellFailures(10 * THIRD, mine, "mine")]
    drop, told = contexts.end(mine)
    assert drop == DropContext(mine, "mine")
    assert told == TellEnd(10 * THIRD, mine, mine)  # no context of ours is open below
    assert contexts.held(mine, 10 * FOURTH) == [TellEnd(10 * FOURTH, mine, mine)]


def test_a_lost_worker_that_had_a_context_has_parted_with_it(contexts):
    contexts.tell(CONTEXT, 10 * FOURTH)
    assert not contexts.has_parted(CONTEXT, 10 * THIRD)
    note_loss(contexts, THIRD)
    note_loss(contexts, FOURTH)
    note_loss(contexts, 5)
    for id in (THIRD, FOURTH):
        assert contexts.has_parted(CONTEXT, next_incarnation(10 * id))
    assert not contexts.has_parted(CONTEXT, next_incarnation(50))
    assert not contexts.has_parted(CONTEXT + 1, next_incarnation(10 * THIRD))


def test_context_of_a_new_life_is_not_taken_for_one_that_has_ended():  # BWD-4
    """Keep it, though the dead life's numbers were greater, whichever life began later."""
    worker: Contexts[str] = Contexts(ME, 0)
    before: Contexts[str] = Contexts(CREATOR, LIVES - 1)
    ended = [before.next_id() for _ in range(3)]
    for context in ended:
        worker.enter(context, 10 * CREATOR, "content")
    worker.released(ended[1], low_watermark=ended[2])
    worker.on_peer_lost(10 * CREATOR, CREATOR, is_replaced=False, living=lambda each: None)
    fresh = Contexts[str](CREATOR, 5).next_id()
    assert worker.enter(fresh, 10 * CREATOR, "content") == "content"
    assert all(worker.enter(context, 10 * THIRD, "late") is None for context in ended)


def test_two_workers_that_share_an_id_do_not_end_contexts_of_each_other():
    one: Contexts[str] = Contexts(ME, 1)
    other: Contexts[str] = Contexts(ME, 0)
    context = one.next_id()
    one.create(context, "mine")
    one.end(context)
    theirs = other.next_id()
    assert one.enter(theirs, 10 * THIRD, "theirs") == "theirs"


def test_only_the_last_lives_of_a_creator_are_remembered():
    worker: Contexts[str] = Contexts(ME, 0)
    ended = [Contexts[str](CREATOR, life).next_id() for life in range(MOST_LIVES + 3)]
    for context in ended:
        worker.released(context, low_watermark=1)
    assert [worker.is_dead(context) for context in ended] == [False] * 3 + [True] * MOST_LIVES
