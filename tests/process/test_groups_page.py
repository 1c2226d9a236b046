"""The programs of docs/groups.md and docs/start.md run.

The first program of each is a script, the rest a notebook.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.parametrize("page", ["groups.md", "start.md"])


def text_and_blocks_of(page: str) -> tuple[str, list[str]]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return text, re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(*arguments: str | Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_program_on_the_page_prints_the_lines_of_the_page(page: str, tmp_path: Path) -> None:
    text, (program, *_) = text_and_blocks_of(page)
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    shown = re.search(r"^```text\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert run(script) == shown[1].splitlines()


def test_the_cells_on_the_page_print_the_lines_of_their_comments(page: str) -> None:
    """Run the cells as a program without a file, like one that Python reads from standard input.

    Notebooks themselves are in `test_notebooks.py`.
    """
    _, (_, *blocks) = text_and_blocks_of(page)
    cells = "\n".join(blocks)
    said = re.findall(r"^\s*print\(.*\)  # (.*)$", cells, flags=re.MULTILINE)
    printed = run("-c", f"__file__ = '<stdin>'  # as Python has it there\n{cells}")
    assert [line for line in printed if "worker0 | " not in line] == said
