"""The programs of docs/groups.md run: the first one as a script, the rest as a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs" / "groups.md").read_text(encoding="utf-8")
PROGRAM, *CELLS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def run(arguments: list[str], program: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=program,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_program_on_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    shown = re.search(r"^```text\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert run([str(script)]) == shown[1].splitlines()


def test_the_cells_on_the_page_print_what_their_comments_say() -> None:
    """A program that Python reads from its standard input has no file, as a notebook has none."""
    cells = "\n".join(CELLS)
    said = re.findall(r"^\s*print\(.*\)  # (.*)$", cells, flags=re.MULTILINE)
    printed = run(["-"], cells)
    assert [line for line in printed if "worker0 | " not in line] == said
