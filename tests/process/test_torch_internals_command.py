"""`python -m farcall.torch_internals` shows which private names of torch are there."""

from __future__ import annotations

import subprocess
import sys

import torch

from farcall import torch_internals as internals
from farcall.torch_internals.table import TABLE

SECONDS = 300


def test_the_command_prints_the_table() -> None:
    command = [sys.executable, "-W", "error", "-m", "farcall.torch_internals"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == f"torch {torch.__version__}"
    assert [line.split()[4] for line in lines] == [entry.path for entry in TABLE.values()]
    there = {name: line.split()[0] == "has" for name, line in zip(TABLE, lines, strict=True)}
    assert there == {name: internals.has(name) for name in TABLE}
