"""A test that fails with an exception that can't be printed fails alone, and is reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

TESTS = Path(__file__).parents[1]

METHODS = ("bool", "str", "repr", "eq", "hash")
PROGRAM = f"""
import threading
import pytest


def fail(*_):
    raise ValueError("from a method")


@pytest.fixture(params={METHODS})
def hostile(request):
    return type("Hostile", (Exception,), {{f"__{{request.param}}__": fail}})


def raises(hostile):
    raise hostile(1)


def test_itself(hostile):
    raises(hostile)


def test_as_cause(hostile):
    try:
        raises(hostile)
    except hostile as error:
        raise RuntimeError("outer") from error


def test_as_context(hostile):
    try:
        raises(hostile)
    except hostile:
        raise RuntimeError("outer")


def test_in_a_thread(hostile):
    thread = threading.Thread(target=raises, args=(hostile,))
    thread.start()
    thread.join()


def test_in_a_destructor(hostile):
    class Ends:
        def __del__(self):
            raise RuntimeError("from a destructor")

    kept = Ends()
    try:
        raises(hostile)
    except hostile:
        del kept  # Python tells of the error only, with that one as its context


@pytest.fixture
def ends_badly(hostile):
    yield
    raises(hostile)


def test_in_teardown(ends_badly):
    pass


def test_that_passes(hostile):
    pass
"""


def test_exceptions_that_can_not_be_printed_fail_their_own_tests_only(tmp_path: Path) -> None:
    program = tmp_path / "test_program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "hostile_reports", "-p", "no:cacheprovider"),
            *("-rA", "-W", "error::pytest.PytestUnhandledThreadExceptionWarning"),
            *("-c", os.devnull, "--rootdir", str(tmp_path), str(program)),
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE,
    )
    shown = ended.stdout + ended.stderr
    assert "INTERNALERROR" not in shown, shown
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, shown
    assert "raises" in shown
    assert "Ends.__del__" in shown
    ends = [
        ("FAILED", "itself"),
        ("FAILED", "as_cause"),
        ("FAILED", "as_context"),
        ("FAILED", "in_a_thread"),
        ("PASSED", "in_a_destructor"),
        ("PASSED", "in_teardown"),
        ("ERROR", "in_teardown"),
        ("PASSED", "that_passes"),
    ]
    found = re.findall(r"^([A-Z]+) .*test_program.py::test_(\w+)\[(\w+)\]", shown, re.MULTILINE)
    assert sorted(found) == sorted((*end, method) for end in ends for method in METHODS), shown
