"""Scripts that are drivers of Ray, and the programs of the pages on `farcall.ray`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from patience import PATIENCE

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = {
    name: program
    for page in ("ray.md", "launch.md")
    for name, program in re.findall(
        r"<!-- ([\w. ]+) -->\n\n```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL
    )
}


def run(folder: Path, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(dedent(program), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **variables},
    )


def said_by_workers(lines: list[str]) -> list[str]:
    """Return the lines of workers, with their names, but not Ray's own before them."""
    plain = (re.sub(r"\x1b\[\d+m", "", line).strip() for line in lines)
    return sorted(re.sub(r"^\((\w+) pid=[^)]*\) ", r"\1: ", one) for one in plain if "pid=" in one)


def run_until_shown(folder: Path, program: str, count: int, **variables: str) -> list[str]:
    """Run a script, end its `input()` when it has shown so many lines of workers; return all."""
    script = folder / "script.py"
    script.write_text(dedent(program), encoding="utf-8")
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_DEDUP_LOGS": "0", **variables},
    )
    with driver:
        assert driver.stdout is not None
        lines: list[str] = []
        while len(said_by_workers(lines)) < count:
            lines.append(driver.stdout.readline())
            assert lines[-1], lines
        assert driver.stdin is not None
        driver.stdin.write("\n")
        driver.stdin.close()
        lines += driver.stdout  # `communicate` would leave out lines that were read ahead
        assert driver.wait(PATIENCE) == 0
        return lines
