"""A test that fails with an exception that can't be printed fails alone, and is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

TESTS = Path(__file__).parents[1]

PROGRAM = """
import threading
import pytest


def fail(*_):
    raise ValueError("from a method")


Hostile = type("Hostile", (Exception,), {{"__{method}__": fail}})


def raises():
    raise Hostile(1)


def test_itself():
    raises()


def test_as_cause():
    try:
        raises()
    except Hostile as error:
        raise RuntimeError("outer") from error


def test_as_context():
    try:
        raises()
    except Hostile:
        raise RuntimeError("outer")


def test_in_a_thread():
    thread = threading.Thread(target=raises)
    thread.start()
    thread.join()


def test_in_a_destructor():
    class Ends:
        def __del__(self):
            raise RuntimeError("from a destructor")

    kept = Ends()
    try:
        raises()
    except Hostile:
        del kept  # Python tells of the error only, with that one as its context


@pytest.fixture
def ends_badly():
    yield
    raises()


def test_in_teardown(ends_badly):
    pass


def test_that_passes():
    pass
"""


@pytest.mark.parametrize("method", ["bool", "str", "repr", "eq", "hash"])
def test_exception_that_can_not_be_printed_fails_its_own_test_only(
    tmp_path: Path, method: str
) -> None:
    program = tmp_path / "test_program.py"
    program.write_text(PROGRAM.format(method=method))
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
    assert "test_that_passes" in shown, shown
    assert " 4 failed, 3 passed" in shown, shown
    assert "1 error in" in shown, shown
    assert "raises" in shown
    assert "Ends.__del__" in shown
