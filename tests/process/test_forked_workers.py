"""A process that was forked from a worker is no worker, though it has the worker's references."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

PROGRAM = Path(__file__).parent / "programs" / "forked_uses.py"
OF_EACH = ["wrong: {}", "loader: NotInitialized", "pending: True", "parent: 4 5"]


def test_forked_processes_never_act_as_the_worker_that_forked_them() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "threads wrong: {}",
        "threads parent: 4",
        *(f"driver {line}" for line in OF_EACH),
        *(f"worker0 | worker {line}" for line in OF_EACH),
        "[0, 1, 7]",  # of children that come back from a called function
        "[0, 1]",  # ... and from a callback
        "[1, 1]",
    ]
    assert "ValueError: in the child" in done.stderr
    assert "lost worker" not in done.stderr
