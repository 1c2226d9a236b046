"""`make test` and `.ci/run` go on after a failure; `make demo` installs no linters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
STEPS = ("test", "lint", "native-test", "sanitize-address", "sanitize-thread", "sanitize-python")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs GNU make")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"MAKEFLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile, with a Python of its own that only notes how it was called."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    python = binaries / "python"
    python.write_text('#!/bin/sh\necho "$@" >> called\ncase "$*" in *$FAILS*) exit 1;; esac\n')
    python.chmod(0o755)
    # As if all had been installed and built.
    for stamp in ("pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        (tmp_path / stamp).touch()
    (tmp_path / "build" / "native").mkdir(parents=True)
    for stamp in (".venv/.made", ".venv/.installed", ".venv/.demos", "build/native/.built"):
        (tmp_path / stamp).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ("nothing at all", ""),
        ("tests/unit", "tests/unit tests/behaviour tests/transport"),
        ("tests/process", "tests/process tests/attacks"),
        ("pytest", "tests/unit tests/behaviour tests/transport tests/process tests/attacks"),
    ],
)
def test_both_halves_of_the_tests_run_whatever_the_first_gives(
    checkout: Path, fails: str, failed: str
) -> None:
    done = run("make", "test", cwd=checkout, FAILS=fails)
    called = (checkout / "called").read_text().splitlines()
    assert len(called) == 2, called
    assert "tests/unit tests/behaviour tests/transport" in called[0]
    assert "tests/process" in called[1]
    assert (done.returncode != 0) == bool(failed), done.stderr
    if failed:
        assert f"Failed: {failed}" in done.stdout.splitlines()


def test_some_tests_give_their_own_exit_status(checkout: Path) -> None:
    assert (
        run("make", "test", "TEST_ARGS=tests/unit -k wire", cwd=checkout, FAILS="none").returncode
        == 0
    )
    done = run("make", "test", "TEST_ARGS=tests/unit", cwd=checkout, FAILS="tests/unit")
    assert done.returncode != 0


@pytest.mark.parametrize("goal", ["demo", "demo-cartpole", "demo-rnn", "demo-parameter-server"])
def test_a_demo_installs_what_users_install_and_no_linters(tmp_path: Path, goal: str) -> None:
    for file in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / file, tmp_path)
    planned = run("make", "-n", goal, cwd=tmp_path).stdout
    (extras,) = re.findall(r'-e "\.\[(.*)\]"', planned)
    assert "demos" in extras.split(",")
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = {name for extra in extras.split(",") for name in optional[extra]}
    for tool in ("ruff", "mypy", "pytest", "hypothesis", "expecttest", "farcall["):
        assert not any(name.startswith(tool) for name in installed)


@pytest.mark.parametrize("goal", ["test", "lint", "native", "sim", "bench", "demo test"])
def test_everything_else_installs_what_developers_need(tmp_path: Path, goal: str) -> None:
    for file in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / file, tmp_path)
    planned = run("make", "-n", *goal.split(), cwd=tmp_path).stdout
    assert re.findall(r'-e "\.\[(.*)\]"', planned) == ["dev"]


def test_after_the_tests_a_demo_installs_nothing(checkout: Path) -> None:
    assert "install" not in run("make", "-n", "demo", cwd=checkout).stdout


def test_after_a_demo_the_tests_install_what_is_missing(checkout: Path) -> None:
    (checkout / ".venv" / ".installed").unlink()
    assert '-e ".[dev]"' in run("make", "-n", "test", cwd=checkout).stdout


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="the steps are those on Linux")
@pytest.mark.parametrize("fails", ["none", "test", "lint", "sanitize-python"])
def test_every_step_of_the_ci_runs_and_has_its_line(tmp_path: Path, fails: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$@" >> called\n[ "$1" != "$FAILS" ]\n')
    make.chmod(0o755)
    done = run(str(tmp_path / ".ci" / "run"), cwd=tmp_path, MAKE=str(make), FAILS=fails)
    called = (tmp_path / "called").read_text().splitlines()
    assert tuple(called[: len(STEPS)]) == STEPS
    assert (done.returncode != 0) == (fails != "none")
    lines = done.stdout.splitlines()[-len(called) :]
    for step, line in zip(called, lines, strict=True):
        assert line.startswith("FAILED" if step == fails else "passed"), lines
        assert line.endswith(f"make {step}")
