"""The words of type checkers about handles: mypy runs over the files beside this one.

A comment behind a line says what it reveals, or what its error contains. Nothing else is reported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

HERE = Path(__file__).parent
SETTINGS = "[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n"  # torch takes a minute
WITH_PLUGIN = SETTINGS.replace("[mypy]", "[mypy]\nplugins = farcall.mypy_plugin")
MODULES = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z]|[a-z]+\b)")  # of a type: "builtins." of its "int"
REPORT = re.compile(r"(\w+\.py):(\d+): (error|note): (.*?)(?:  \[[\w-]+\])?")

Line = tuple[str, int]  # its file, and its number


def run_mypy(files: tuple[str, ...], settings: str, folder: Path) -> dict[Line, list[str]]:
    """Return what mypy reports of each line: "reveals: X" or "error: ..."."""
    config = folder / "mypy.ini"
    config.write_text(settings)
    command = ["-m", "mypy", "--no-pretty", "--cache-dir", folder, "--config-file", config]
    done = subprocess.run(
        [sys.executable, *command, *files],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=HERE,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    reports: dict[Line, list[str]] = {}
    for line in done.stdout.splitlines()[:-1]:
        found = REPORT.fullmatch(line)
        assert found is not None, line
        text = f"{found[3]}: {found[4]}"
        if text.startswith("note: Revealed type is "):
            text = "reveals: " + MODULES.sub("", text.split('"')[1])
        if not text.startswith("note: "):  # more about an error
            reports.setdefault((found[1], int(found[2])), []).append(text)
    return reports


def comments_of(file: str) -> dict[Line, str]:
    lines = enumerate((HERE / file).read_text().splitlines(), 1)
    found = [(number, re.search(r"# ((?:error|reveals): .*)", line)) for number, line in lines]
    return {(file, number): match[1] for number, match in found if match is not None}


@pytest.mark.parametrize(
    ("settings", "files"),
    [(SETTINGS, ("right.py", "wrong.py")), (WITH_PLUGIN, ("right.py", "members.py"))],
    ids=["plain", "with-plugin"],
)
def test_type_checker_agrees_with_the_comments(
    settings: str, files: tuple[str, ...], tmp_path: Path
) -> None:
    reports = run_mypy(files, settings, tmp_path)
    comments = {line: text for file in files for line, text in comments_of(file).items()}
    assert reports.keys() == comments.keys(), reports
    for line, comment in comments.items():
        kind, _, text = comment.partition(": ")
        if kind == "error":
            assert any(text in report for report in reports[line]), (line, reports[line])
        else:
            assert reports[line] == [comment]
