"""The trials of `make field`: the machinery, and the shortest trial."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

RUN = Path(__file__).parents[1] / "field" / "run.py"

TWO_TRIALS = f"""
import io, sys
from pathlib import Path
sys.path.insert(0, {str(RUN.parent)!r})
import run
from report import Report, Settings

def met(report, settings):
    report.demand("all is well", "it is", settings.workers == 3)

def raises(report, settings):
    raise OSError("no such host")

settings, ends = Settings(Path("."), 1.0, 3, 1, 1, 1, 1), []
for trials in ({{"met": met}}, {{"raises": raises, "met": met}}):
    report = Report(io.StringIO())
    ends.append(run.run(trials, report, settings))
    print(report.out.getvalue())
assert ends == [0, 1], ends
"""


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_a_trial_that_raises_has_failed_and_the_next_one_runs() -> None:
    ended = python("-c", TWO_TRIALS)
    assert ended.returncode == 0, ended.stderr
    assert "1 of 1 demands met" in ended.stdout
    assert "1 of 2 demands met" in ended.stdout
    assert "no such host" in ended.stdout


def test_unknown_trial() -> None:
    assert "there is no trial picnic" in python(RUN, "--trials", "picnic").stderr


@pytest.mark.parametrize("workers", [4])
def test_trial_of_many_workers(workers: int) -> None:
    ended = python(RUN, "--trials", "many", "--workers", workers)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 of 3 demands met" in ended.stdout
