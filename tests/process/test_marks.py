"""Tests marked `fast` fail if they start a process or open a socket."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

ROOT = Path(__file__).parents[2]
TESTS = """
import os, socket, subprocess, sys
import pytest

@pytest.fixture
def listener():
    with socket.socket():
        yield

def test_calm(): pass
def test_socket(): socket.socket().close()
def test_socket_of_a_fixture(listener): pass
def test_process(): subprocess.run([sys.executable, "-c", ""], check=True)
def test_fork():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
def test_error_that_is_caught():
    try:
        socket.socket(-2)
    except OSError:
        pass
def test_calm_again(): pass
"""


def run(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rE", *arguments, "tests"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "passed" in done.stdout, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert done.returncode == bool(lines), done.stdout
    assert not lines or "Name its file in tests/marks.py" in done.stdout
    return [line.partition("::")[2].partition(" ")[0] for line in lines]


def test_a_fast_test_that_starts_a_process_or_opens_a_socket_fails(tmp_path: Path) -> None:
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    for path in [ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py")]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "tests" / "unit" / "test_one.py").write_text(TESTS)
    assert sorted(run(tmp_path, "-m", "fast")) == [
        "test_error_that_is_caught",
        "test_fork",
        "test_process",
        "test_socket",
        "test_socket_of_a_fixture",
    ]
    assert run(tmp_path) == [], "other runs are as they were"
