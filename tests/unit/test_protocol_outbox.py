"""The invariants of an outbox, over every order of events that hypothesis finds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farcall.protocol.outbox import PRUNE_FROM, Outbox

MOST = 100


class Boxes(RuleBasedStateMachine):
    """A box beside a list. Items are numbered; finished ones are known by number."""

    def __init__(self) -> None:
        super().__init__()
        self.box: Outbox[int] = Outbox(MOST)
        self.waiting: dict[int, int] = {}  # item -> bytes, in order
        self.out: list[int] = []
        self.count = 0
        self.senders = 0
        self.sending = False
        self.is_lost = False

    @rule(size=st.integers(0, 150), asks=st.booleans())
    def put(self, size: int, asks: bool) -> None:
        if size and (asks or not self.waiting) and not self.box.has_room(size):
            others = sum(self.waiting.values())
            assert others > 0  # OUT-5
            assert others + size > MOST
            return
        self.put_item(size if asks else 0)

    @rule(count=st.integers(PRUNE_FROM, 3 * PRUNE_FROM))
    def put_many(self, count: int) -> None:
        for _ in range(count):
            self.put_item(0)

    def put_item(self, size: int) -> None:
        starts = self.box.put(self.count, size)
        if self.is_lost:
            assert starts is None
        else:
            assert starts == (self.senders == 0)  # OUT-1
            self.senders += bool(starts)
            self.waiting[self.count] = size
        self.count += 1

    @precondition(lambda self: self.senders)
    @rule()
    def send_next(self) -> None:
        item = self.box.next()
        if item is None:
            assert not self.waiting
            self.senders -= 1
        else:
            assert item == next(iter(self.waiting))  # OUT-3
            self.take(item)

    @rule(odd=st.booleans())
    def prune(self, odd: bool) -> None:
        for item in self.box.prune(lambda item: item % 2 == odd):
            assert item % 2 == odd
            self.take(item)

    @rule()
    def take_all(self) -> None:
        assert self.box.take_all() == list(self.waiting)
        for item in list(self.waiting):
            self.take(item)
        self.is_lost = True

    def take(self, item: int) -> None:
        del self.waiting[item]  # OUT-2: it was there, and has not come out before
        self.out.append(item)

    @invariant()
    def holds(self) -> None:
        assert self.senders in (0, 1)  # OUT-1
        assert self.box.is_idle == (self.senders == 0)  # OUT-4
        assert not (self.box.is_idle and self.waiting)  # OUT-4
        assert len(self.box) == len(self.waiting)
        sizes = [size for size in self.waiting.values() if size]
        assert self.box.waiting_bytes == sum(sizes)
        assert sum(sizes) <= MOST or len(sizes) == 1  # OUT-5
        assert len(self.out) == len(set(self.out))  # OUT-2


TestBoxes = Boxes.TestCase
TestBoxes.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_ended_items_do_not_pile_up() -> None:
    """Keep dead items below twice the living ones, and a few, though the sender gets nowhere."""
    box: Outbox[int] = Outbox(MOST)
    over: set[int] = set()
    for item in range(10_000):
        box.prune(over.__contains__)
        box.put(item, 0)
        if item >= 10:
            over.add(item)
    assert len(box) <= 2 * 10 + PRUNE_FROM
