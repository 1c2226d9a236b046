"""Each fuzz target takes the messages of honest peers, and what some changes leave of them.

`make fuzz` goes on for hours.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.targets import TARGETS, Target
from hypothesis import given, settings
from hypothesis import strategies as st

RUN = Path(__file__).parents[1] / "fuzz" / "run.py"


@pytest.fixture(params=sorted(TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def test_target_takes_the_bytes_of_an_honest_peer(target: Target) -> None:
    seeds = list(target.seeds())
    assert seeds
    for seed in (*seeds, b""):
        target.run(seed)


@pytest.mark.parametrize("name", sorted(TARGETS))
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_target_takes_broken_bytes(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    damaged = bytearray(data.draw(st.sampled_from(list(target.seeds()))))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    target.run(bytes(damaged))


def test_input_that_ends_the_process_is_kept_and_tried_again(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    for file in ("run.py", "engine.py"):
        (tmp_path / "tests" / "fuzz").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / "fuzz" / file).write_text((RUN.parent / file).read_text())
    run = tmp_path / "tests" / "fuzz" / "run.py"
    run.with_name("targets.py").write_text(BROKEN)
    done = subprocess.run(
        [sys.executable, str(run), "--seconds", "60"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    (found,) = (tmp_path / "build" / "fuzz").iterdir()
    assert found.read_bytes()[0] > 100
    assert f"--replay reader {found}" in done.stdout
    again = [sys.executable, str(run), "--replay", "reader", str(found)]
    assert subprocess.run(again, capture_output=True, check=False).returncode == -11


BROKEN = """
import ctypes
from collections import namedtuple

def run(data):
    if len(data) > 3 and data[0] > 100:
        ctypes.string_at(0)

TARGETS = {"reader": namedtuple("Target", "run seeds")(run, lambda: [b"bug"])}
"""
