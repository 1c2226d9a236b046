"""The trials with real processes: the machinery, and short forms of some."""

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

settings, ends = Settings(Path("."), 1.0, 1.0, 0.0, 3, 1, 1, 1, 1), []
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


def test_short_chaos() -> None:
    """Run the short form of `make chaos`, without its limits of time: the machine may be busy.

    A pause after each call leaves room for other tests. Some thousand calls are left, of which
    hundreds meet a worker that is killed or stopped.
    """
    short = ("--minutes", 0.1, "--pause", 0.05)
    ended = python(RUN, "--trials", "chaos", *short, "--allowed", PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "9 of 9 demands met" in ended.stdout


def test_short_soak() -> None:
    """Run the short form of `make soak`."""
    sizes = ("--calls", 30_000, "--references", 3_000, "--passes", 300)
    ended = python(RUN, "--trials", "soak", *sizes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5 of 5 demands met" in ended.stdout


GROWTH = f"""
import sys
sys.path[:0] = [{str(RUN.parent)!r}, {str(RUN.parents[1])!r}, {str(RUN.parents[1] / "process")!r}]
from soak import Memory, growth
early, flat = [*range(900, 1000, 2)], [1000] * 50  # samples of anonymous memory
print([round(growth([Memory(2 * sample, sample) for sample in samples]), 2) for samples in (
    early + flat,
    early + [1000 + 4 * n for n in range(50)],  # it goes on growing
    early + [1000] * 20 + [1500] + [1000] * 29,  # once, for a moment
)])
"""


def test_growth_of_the_second_half_is_seen_and_a_single_sample_is_not() -> None:
    ended = python("-c", GROWTH)
    assert ended.stdout == "[0.0, 0.09, 0.0]\n", ended.stderr
