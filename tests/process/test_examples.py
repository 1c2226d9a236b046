"""The programs in examples/, run as users run them; their look is checked, too."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from demos import start_session
from launching import environment
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MARK = "EXAMPLE_OF_THIS_TEST"

each = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def by_name(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


def started_with(mark: str) -> Iterator[int]:
    """Return the living processes that have this mark in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)
        except OSError:  # it has ended, or is another user's
            continue


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have what the test starts bear a mark; at the end, wait until all of it has ended."""
    name = str(uuid.uuid4())
    with monkeypatch.context() as patch:
        patch.setenv(MARK, name)
        patch.setenv("PYTHONUNBUFFERED", "1")
        yield name
    for process in started_with(name):
        try:
            ended = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        try:
            assert select.select([ended], [], [], PATIENCE)[0], f"{process} is left"
        finally:
            os.close(ended)


def run(example: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example from another directory, on few threads: other tests need the cores, too."""
    return subprocess.run(
        [sys.executable, str(example)],
        env=environment(OMP_NUM_THREADS="1"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.usefixtures("mark")
@each
def test_example_succeeds(example: Path, tmp_path: Path) -> None:
    done = run(example, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok: "), done.stdout
    assert "Warning" not in done.stderr


@pytest.mark.usefixtures("mark")
def test_example_that_goes_wrong_says_so(tmp_path: Path) -> None:
    """Speed up the model in one process only, so its losses are not those of the pipeline."""
    source = by_name("pipeline").read_text(encoding="utf-8")
    wrong = tmp_path / "pipeline.py"
    changed = source.replace("model.parameters(), lr=RATE", "model.parameters(), lr=2 * RATE")
    assert changed != source
    wrong.write_text(changed, encoding="utf-8")
    done = run(wrong, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("failed: ")
    assert "ok: " not in done.stdout


# One that starts its workers by `farcall.local`, with so much to do that it does not end before.
@pytest.mark.parametrize(
    ("name", "line", "much", "more"), [("impala", "50: ", " 300, ", f" {10**9}, ")]
)
def test_ctrl_c_ends_an_example(
    name: str, line: str, much: str, more: str, mark: str, tmp_path: Path
) -> None:
    source = by_name(name).read_text(encoding="utf-8")
    assert source.count(much) == 1
    endless = tmp_path / f"{name}.py"
    endless.write_text(source.replace(much, more), encoding="utf-8")
    running = start_session(sys.executable, str(endless))
    with running:
        assert running.stdout is not None
        for printed in running.stdout:
            if printed.startswith(line):
                break
        assert running.poll() is None
        assert running.pid in started_with(mark)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        assert running.wait(PATIENCE) in (-signal.SIGINT, 128 + signal.SIGINT)
        assert running.stderr is not None
        assert running.stderr.read().count("KeyboardInterrupt\n") == 1


@each
def test_help_is_there(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(example), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--seed SEED of random numbers" in " ".join(said.split())
    first, *_ = example.read_text(encoding="utf-8").removeprefix('"""').splitlines()
    assert first in " ".join(said.split())


@each
def test_example_is_short_and_says_what_it_shows(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert 40 <= len(text.splitlines()) <= 100
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring is not None
    assert re.search(rf"\n\n    python examples/{example.name} --seed 0\n\nExpect ", docstring)
    assert 'raise SystemExit(f"failed: ' in text or 'raise SystemExit("failed: ' in text


PUBLIC = ("farcall", "farcall.autograd", "farcall.errors", "farcall.nn", "farcall.optim")
PUBLIC += ("farcall.rpc",)


@each
def test_example_uses_public_names_only(example: Path) -> None:
    tree = ast.parse(example.read_text(encoding="utf-8"))
    modules = {"farcall": "farcall"}  # by the names under which they are imported
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported = [one.name for one in names]
                assert not [one for one in imported if one.startswith("farcall.")], imported
            case ast.ImportFrom(module=module, names=names) if f"{module}.".startswith("farcall."):
                assert module in PUBLIC
                for one in names:
                    assert one.name in dir(importlib.import_module(module))
                    modules[one.name] = f"{module}.{one.name}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if modules.get(name) in PUBLIC:
                assert attr in dir(importlib.import_module(modules[name]))
            case ast.Attribute(attr=attr):
                assert not attr.startswith("_") or attr.endswith("__")


def test_the_table_names_every_example() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[(\w+)\]\((\w+)\.py\) \|", page, flags=re.MULTILINE)
    assert linked == [(path, path) for path, _ in linked]
    assert sorted(path for path, _ in linked) == [path.stem for path in EXAMPLES]
