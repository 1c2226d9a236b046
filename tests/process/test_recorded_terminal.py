"""`docs/recording.py` runs a program in a terminal of the size that it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "docs")
    from recording import Size, record

SIZE = Size(71, 9)


def printed(program: str, folder: Path) -> bytes:
    chunks = record([sys.executable, "-c", program], folder, SIZE)
    assert [chunk.at for chunk in chunks] == sorted(chunk.at for chunk in chunks)
    return b"".join(chunk.data for chunk in chunks)


def test_a_program_has_a_terminal_of_that_size_and_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "7")
    monkeypatch.setenv("NO_COLOR", "1")
    program = (
        "import os, shutil, sys; print(*shutil.get_terminal_size(), sys.stdin.isatty(), "
        "sys.stderr.isatty(), os.environ['TERM'], os.environ.get('NO_COLOR'), os.getcwd())"
    )
    where = os.path.realpath(tmp_path)
    expected = f"71 9 True True xterm-256color None {where}"
    assert printed(program, tmp_path).decode().split() == expected.split()


def test_all_that_a_program_prints_is_recorded(tmp_path: Path) -> None:
    program = "for number in range(20_000): print(number)"
    assert printed(program, tmp_path).split() == [b"%d" % number for number in range(20_000)]


def test_a_program_that_fails_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)no such thing.*exit code 3"):
        printed("import sys; print('no such thing'); sys.exit(3)", tmp_path)
