"""Broken strict values in a process of their own, where a crash is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

PROGRAM = Path(__file__).parent / "programs" / "fuzz_strict.py"


def test_no_bytes_crash_a_reader_that_uses_the_value(tmp_path: Path) -> None:
    last = tmp_path / "last"
    ended = subprocess.run(
        [sys.executable, PROGRAM, "1", "3000", last],
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, f"{ended.stderr}\n{last.read_bytes()!r}"
    read, refused = map(int, ended.stdout.split())
    assert read > 300
    assert refused > 300
