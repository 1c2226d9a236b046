"""`python -m farcall.torch_internals` shows which private names of torch are there."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from farcall.torch_internals.table import TABLE

SECONDS = 300
# In a process of its own, since a look at each name imports Dynamo.
THERE = """
import json
from farcall import torch_internals as internals
print(json.dumps({name: internals.has(name) for name in internals.TABLE}))
"""


def output_of(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_command_prints_the_table() -> None:
    first, *lines = output_of("-m", "farcall.torch_internals").splitlines()
    assert first == f"torch {torch.__version__}"
    assert [line.split()[4] for line in lines] == [entry.path for entry in TABLE.values()]
    there = {name: line.split()[0] == "has" for name, line in zip(TABLE, lines, strict=True)}
    assert there == json.loads(output_of("-c", THERE))
