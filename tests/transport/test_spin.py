"""Spinning before sleeping: it must miss nothing, and stop where it does not pay."""

from __future__ import annotations

import math

import pytest

from farcall.transport import spin
from farcall.transport.sockets.poller import WOKEN, new_poller
from farcall.transport.spin import SpinBudget, Spinner


def never() -> list[object]:
    raise AssertionError("it slept")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning goes on however busy the machine is."""
    monkeypatch.setattr(spin, "MAX_SPIN_SECONDS", math.inf)
    monkeypatch.setattr(spin, "STALL_SECONDS", math.inf)


@pytest.mark.usefixtures("patient")
def test_wake_up_that_comes_while_it_spins_ends_the_wait() -> None:
    poller = new_poller()
    try:
        poller.wake()
        assert Spinner(SpinBudget(1)).wait(lambda: poller.wait(0.0), never) == [WOKEN]
    finally:
        poller.close()


@pytest.mark.usefixtures("patient")
def test_a_frame_that_is_there_soon_is_found_without_sleeping() -> None:
    looks = iter([[], [], ["it"]])
    assert Spinner(SpinBudget(1)).wait(lambda: next(looks), never) == ["it"]


def test_without_a_spare_core_it_sleeps_at_once() -> None:
    assert Spinner(SpinBudget(0)).wait(never, lambda: ["slept"]) == ["slept"]


def test_budget_comes_back_after_each_wait() -> None:
    spinner = Spinner(SpinBudget(1))
    for _ in range(10):
        assert spinner.wait(lambda: ["it"], never) == ["it"]


def test_after_long_waits_it_sleeps_at_once() -> None:
    spinner = Spinner(SpinBudget(1))
    spinner._average = 1.0
    assert spinner.wait(never, lambda: ["slept"]) == ["slept"]
