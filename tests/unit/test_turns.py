"""`DialTurns`: a few callers go on at once, and a slow one holds up the others for a while only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from patience import PATIENCE

from farcall.transport.connect.turns import DialTurns


class Caller:
    """A thread that takes a turn, and keeps it until `end`."""

    def __init__(self, turns: DialTurns, order: list[int], number: int, deadline: float) -> None:
        self.has_begun = threading.Event()
        self._may_end = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(turns, order, number, deadline))
        self._thread.start()

    def _run(self, turns: DialTurns, order: list[int], number: int, deadline: float) -> None:
        with turns.turn(deadline):
            order.append(number)
            self.has_begun.set()
            self._may_end.wait(PATIENCE)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(PATIENCE)


@contextmanager
def calling(
    turns: DialTurns, order: list[int], count: int, seconds: float = PATIENCE
) -> Iterator[list[Caller]]:
    """Start callers one after another: each has begun, or waits in the queue, before the next."""
    callers: list[Caller] = []
    try:
        for number in range(count):
            callers.append(Caller(turns, order, number, time.monotonic() + seconds))
            wait_until(lambda number=number: len(turns._begun) + len(turns._queue) > number)
        yield callers
    finally:
        turns.close()
        for one in callers:
            one.end()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_no_more_than_so_many_go_on_at_once_and_in_order() -> None:
    order: list[int] = []
    turns = DialTurns(3, PATIENCE)
    with calling(turns, order, 8) as callers:
        wait_until(lambda: len(order) == 3)
        for ended, number in enumerate((1, 0, 3, 2, 4), start=1):
            callers[number].end()
            wait_until(lambda ended=ended: len(order) == 3 + ended)
            assert len(turns._begun) == 3
            assert sorted(order) == list(range(3 + ended))


def test_a_turn_that_takes_too_long_holds_up_no_other() -> None:
    order: list[int] = []
    with calling(DialTurns(2, 0.05), order, 7):
        wait_until(lambda: len(order) == 7)


def test_a_caller_goes_on_at_its_deadline_without_a_turn() -> None:
    order: list[int] = []
    turns = DialTurns(1, PATIENCE)
    with calling(turns, order, 2), calling(turns, order, 1, seconds=0.05):
        wait_until(lambda: len(order) == 2)
        assert order == [0, 0]


def test_all_go_on_when_it_is_closed() -> None:
    order: list[int] = []
    turns = DialTurns(1, PATIENCE)
    with calling(turns, order, 5):
        turns.close()
        wait_until(lambda: len(order) == 5)
        with turns.turn(time.monotonic() + PATIENCE):
            pass


def test_an_error_ends_a_turn() -> None:
    turns = DialTurns(1, PATIENCE)
    for _ in range(3):
        with pytest.raises(KeyError), turns.turn(time.monotonic() + PATIENCE):
            raise KeyError
    assert not turns._begun
