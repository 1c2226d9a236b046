"""The invariants of admission, over every order of events that hypothesis finds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farcall.protocol.admission import Admission, Bounds

MOST = 100


class Gates(RuleBasedStateMachine):
    """An admission beside a list. Jobs are numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.admission: Admission[int] = Admission(Bounds(MOST))
        self.count = 0
        self.held: list[int] = []
        self.answers: list[int] = []  # bytes of each that waits
        self.is_lost = False

    @rule()
    def begin(self) -> None:
        begins = self.admission.begin(self.count)
        assert begins == (self.is_lost or sum(self.answers) < MOST)  # ADM-2
        if not begins:
            self.held.append(self.count)
        self.count += 1

    @rule(size=st.integers(1, 150))
    def waits(self, size: int) -> None:
        self.admission.waits(size)
        self.answers.append(size)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def went(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.answers) - 1))
        out = self.admission.went(self.answers.pop(index))
        if sum(self.answers) < MOST:
            assert out == self.held  # ADM-1
            self.held = []
        else:
            assert out == []

    @rule()
    def take_all(self) -> None:
        assert self.admission.take_all() == self.held  # ADM-1
        self.held, self.is_lost = [], True

    @invariant()
    def holds(self) -> None:
        assert len(self.admission) == len(self.held)
        assert self.admission.waiting_bytes == sum(self.answers)
        if self.is_lost or sum(self.answers) < MOST:
            assert not self.held  # ADM-3


TestAdmission = Gates.TestCase
TestAdmission.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_nothing_is_held_while_nothing_waits_whatever_the_bound() -> None:
    admission: Admission[int] = Admission(Bounds(0))
    assert admission.begin(1)
    admission.waits(1)
    assert not admission.begin(2)
    assert admission.went(1) == [2]
    assert admission.begin(3)


REQUESTS, BYTES = 6, 1000


class Queues(RuleBasedStateMachine):
    """An admission beside a list of the queued requests."""

    def __init__(self) -> None:
        super().__init__()
        self.admission: Admission[int] = Admission(Bounds(MOST, REQUESTS, BYTES))
        self.queued: list[int] = []  # bytes of each
        self.allowed = REQUESTS, BYTES
        self.is_lost = False

    @rule(size=st.integers(1, 400))
    def queue(self, size: int) -> None:
        self.admission.queue(size)
        self.queued.append(size)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def begun(self, data: st.DataObject) -> None:
        self.admission.begun(self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1))))
        if self.is_short:
            self.allowed = REQUESTS, BYTES

    @rule()
    def stuck(self) -> None:
        if not self.admission.reads:
            requests, size = self.allowed
            self.allowed = requests + len(self.queued), size + sum(self.queued)
        self.admission.stuck()
        assert self.admission.reads  # ADM-6

    @rule()
    def take_all(self) -> None:
        self.admission.take_all()
        self.is_lost = True

    @property
    def is_short(self) -> bool:
        return len(self.queued) <= REQUESTS // 2 and sum(self.queued) <= BYTES // 2

    @invariant()
    def reads(self) -> None:
        admission = self.admission
        assert (admission.queued, admission.queued_bytes) == (len(self.queued), sum(self.queued))
        requests, size = self.allowed
        if self.is_lost or self.is_short:
            assert admission.reads  # ADM-5
        elif len(self.queued) > requests or sum(self.queued) > size:
            assert not admission.reads  # ADM-4


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def test_a_request_larger_than_the_bound_is_taken_when_nothing_is_queued() -> None:
    admission: Admission[int] = Admission(Bounds(MOST, 1, 0))
    for _ in range(3):
        assert admission.reads
        admission.queue(10)
        assert not admission.reads
        admission.begun(10)
