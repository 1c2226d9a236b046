"""A test that takes too long is ended, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE
from timeouts import ALARM, Alarm


class Rung:
    """The names that an alarm has called."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._last = threading.Semaphore(0)

    def note(self, name: str) -> None:
        self.names.append(name)
        if name == "last":
            self._last.release()

    def wait_for_last(self) -> None:
        assert self._last.acquire(timeout=PATIENCE)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.cancel()


def test_it_rings_when_the_time_has_passed(alarm: Alarm) -> None:
    rung = Rung()
    alarm.set(0.01, lambda: rung.note("last"))
    rung.wait_for_last()
    assert rung.names == ["last"]


def test_a_short_time_after_a_long_one_is_not_missed(alarm: Alarm) -> None:
    rung = Rung()
    alarm.set(100 * PATIENCE, lambda: rung.note("never"))
    alarm.set(0.01, lambda: rung.note("last"))
    rung.wait_for_last()
    alarm.set(0.01, lambda: rung.note("last"))
    rung.wait_for_last()
    assert "never" not in rung.names


def test_what_is_cancelled_does_not_ring(alarm: Alarm) -> None:
    rung = Rung()
    with alarm._changed:  # so that the alarm's thread sees the last state only
        alarm.set(0, lambda: rung.note("cancelled"))
        alarm.cancel()
    with alarm._changed:
        alarm.set(0, lambda: rung.note("replaced"))
        alarm.set(0, lambda: rung.note("last"))
    rung.wait_for_last()
    assert rung.names == ["last"]


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_stacks_of_a_test_that_hangs_are_shown(workers: str, tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text(
        "import threading\n"
        "def test_hang():\n"
        "    print('printed before')\n"
        "    threading.Event().wait()\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "timeouts", "-p", "no:cacheprovider", "-n"]
    done = subprocess.run(
        [*command, workers, "--timeout=0.1", "--timeout-method=thread", tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    for shown in ("printed before", "Stack of MainThread", "threading.Event().wait()"):
        assert shown in done.stdout


def test_tests_are_watched_by_it(request: pytest.FixtureRequest) -> None:
    # None with --timeout=0.
    assert getattr(request.node, "cancel_timeout", ALARM.cancel) == ALARM.cancel
