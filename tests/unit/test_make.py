"""`make test` and `.ci/run` go on after a failure; `make demo` installs no linters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
SOURCES = (
    "pyproject.toml",
    "constraints.txt",
    "requirements/build.txt",
    "requirements/demos.txt",
    "requirements/dev.txt",
    "CMakeLists.txt",
)
STAMPS = ("made", "compiles", "installed", "demos")
STEPS = (
    "test",
    "check",
    "matrix MATRIX_ARGS=--short",
    "native-test",
    "sanitize-address",
    "sanitize-thread",
    "sanitize-python",
)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs GNU make")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"MAKEFLAGS": "", "TEST_ARGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the Makefile, with a Python that only notes how it was called."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    python = binaries / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" >> called\necho "$MAKEFLAGS" >> flags\n'
        'case "$*" in *$FAILS*) exit 1;; esac\n'
    )
    python.chmod(0o755)
    # As if all had been installed and built.
    (tmp_path / "requirements").mkdir()
    for stamp in SOURCES:
        (tmp_path / stamp).touch()
    (tmp_path / "build" / "native").mkdir(parents=True)
    for stamp in (*(f".venv/.{name}" for name in STAMPS), "build/native/.built"):
        (tmp_path / stamp).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ("nothing at all", ""),
        ("tests/unit", "tests/unit tests/behaviour tests/transport tests/typing"),
        ("tests/process", "tests/attacks tests/process"),
        (
            "pytest",
            "tests/unit tests/behaviour tests/transport tests/typing tests/attacks tests/process",
        ),
    ],
)
def test_both_halves_of_the_tests_run_whatever_the_other_gives(
    checkout: Path, fails: str, failed: str
) -> None:
    done = run("make", "test", cwd=checkout, FAILS=fails)
    called = (checkout / "called").read_text().splitlines()
    halves = sorted(line.partition("faulthandler_timeout=")[2] for line in called)
    assert halves == [  # they begin at once, in any order
        "1000 tests/attacks tests/process",
        "700 tests/unit tests/behaviour tests/transport tests/typing",
    ]
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
def test_a_demo_installs_the_packages_of_users_and_no_linters(goal: str) -> None:
    assert locked_by(goal) == ["build", "demos"]
    names = {requirement.name for requirement in locked("demos")}
    assert {"gymnasium", "cmake", "msgspec"} <= names
    assert names.isdisjoint({"ruff", "mypy", "pytest", "hypothesis", "expecttest"})


@pytest.mark.parametrize("goal", ["test", "lint", "native", "sim", "bench", "demo test"])
def test_everything_else_installs_the_packages_of_developers(goal: str) -> None:
    assert locked_by(goal) == ["build", "dev"]


def locked_by(goal: str) -> list[str]:
    """Return the files of requirements/ that a goal installs where nothing is installed."""
    planned = run("make", "-n", *goal.split(), "VENV=build/none", "TOOLS=build/no").stdout
    return re.findall(r"--require-hashes -r requirements/(\w+).txt", planned)


def test_all_but_torch_is_installed_by_hash() -> None:
    planned = run("make", "-n", "bench-all", "audit", "VENV=build/none", "TOOLS=build/no").stdout
    installs = re.findall(r"pip install (.*)", planned)
    assert len(installs) == 8
    for install in installs:
        is_locked = "--no-deps --require-hashes -r" in install
        is_ours = "--no-deps --no-build-isolation" in install and install.endswith(" -e .")
        assert is_locked or is_ours or install.endswith("-c constraints.txt torch")


def locked(name: str) -> list[Requirement]:
    """Return the packages of a file of requirements/, each with its hashes."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    entries = [line.split(" --hash=sha256:") for line in lines if not line.lstrip().startswith("#")]
    assert all(re.fullmatch("[0-9a-f]{64} *", digest) for _, *rest in entries for digest in rest)
    assert all(len(entry) > 1 for entry in entries)
    return [Requirement(entry[0]) for entry in entries]


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("build", ["build"]),
        ("demos", ["demos", "build"]),
        ("dev", ["dev"]),
        ("bench", ["dev", "bench"]),
        ("lock", ["lock"]),
    ],
)
def test_lock_has_the_packages_that_the_project_needs(name: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    pending = list(extras)
    while pending:
        for requirement in map(Requirement, optional[pending.pop()]):
            if requirement.name == "farcall":
                pending += requirement.extras
            else:
                wanted.append(requirement)
    versions = {(one.name, str(next(iter(one.specifier)).version)) for one in locked(name)}
    assert "torch" not in {name for name, _ in versions}
    for requirement in wanted:
        found = [version for name, version in versions if name == requirement.name]
        assert requirement.name == "torch" or found, requirement
        assert all(requirement.specifier.contains(version) for version in found), requirement


def test_lock_has_the_versions_that_were_chosen() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    chosen = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for requirement in chosen:
        found = [
            one.specifier
            for one in (*locked("bench"), *locked("lock"), *locked("wheel"))
            if one.name == requirement.name
        ]
        assert requirement.specifier in found or requirement.name == "torch", requirement


@pytest.mark.parametrize("name", ["demos", "dev", "bench"])
def test_what_compiles_is_not_installed_again_while_it_compiles(name: str) -> None:
    def versions(name: str) -> set[tuple[str, str]]:
        return {(one.name, str(one.specifier)) for one in locked(name)}

    assert versions("build") <= versions(name)


@pytest.mark.parametrize(
    ("goals", "jobs"), [("test", "2"), ("demo", "2"), ("bench bench-keep", "")]
)
def test_the_compiler_works_while_pip_does_and_goals_keep_their_order(
    checkout: Path, goals: str, jobs: str
) -> None:
    with (checkout / "Makefile").open("a") as makefile:
        makefile.write("$(info jobs:$(patsubst -j%,%,$(filter -j%,$(MAKEFLAGS))))\n")
    planned = run("make", "-n", *goals.split(), cwd=checkout).stdout
    assert f"jobs:{jobs}\n" in planned


def test_jobs_of_make_are_not_handed_on(checkout: Path) -> None:
    run("make", "test", cwd=checkout, FAILS="nothing at all")
    assert (checkout / "flags").read_text().split() == []  # Ninja would try to share them


def test_sanitizers_are_tried_one_after_the_other() -> None:
    rules = run("make", "-n", "-p", "sanitize").stdout
    assert re.search(r"^sanitize-thread: .*\| sanitize-address$", rules, re.MULTILINE)


def test_after_the_tests_a_demo_installs_nothing(checkout: Path) -> None:
    assert "install" not in run("make", "-n", "demo", cwd=checkout).stdout


def test_after_a_demo_the_tests_install_the_missing_packages(checkout: Path) -> None:
    (checkout / ".venv" / ".installed").unlink()
    assert "requirements/dev.txt" in run("make", "-n", "test", cwd=checkout).stdout


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="the steps are those on Linux")
@pytest.mark.parametrize("fails", ["none", "test", "check", "sanitize-python"])
def test_every_step_of_the_ci_runs_and_has_its_line(tmp_path: Path, fails: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$@" >> called\n[ "$1" != "$FAILS" ]\n')
    make.chmod(0o755)
    done = run(str(tmp_path / ".ci" / "run"), cwd=tmp_path, MAKE=str(make), FAILS=fails)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[0] == "test"
    assert {*STEPS} <= {*called}
    assert called.index("sanitize-address") < called.index("sanitize-python")  # in one folder
    assert (done.returncode != 0) == (fails != "none")
    lines = done.stdout.splitlines()[-len(called) :]
    assert sorted(line.partition(" make ")[2] for line in lines) == sorted(called)
    for line in lines:
        assert line.startswith("FAILED" if line.endswith(f"make {fails}") else "passed"), lines
