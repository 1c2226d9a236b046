"""farcall without optional dependencies: click and rich for the command line, numpy for arrays."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from patience import PATIENCE

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
HIDDEN = "import sys; sys.modules.update(click=None, rich=None, numpy=None)\n"
WORKS = """
import farcall.actors, farcall.compat, farcall.functions, farcall.groups, farcall.monitor
import farcall.nn, farcall.optim, farcall.testing, farcall.testing.cluster
from farcall.serde.strict.arrays import array_of
import warnings
warnings.simplefilter("ignore")  # torch says that numpy is not there
import torch
import farcall
from farcall import rpc

if __name__ == "__main__":
    with farcall.local(1) as group:
        print(int(group[0].call(torch.sum, torch.ones(100_000))))
        counts = group[0].remote(dict, {"a": 1})
        print(counts.rpc_sync().get("a"))
    try:
        array_of("<f4", (1,), b"1234")
    except ValueError as error:
        print(error)
"""
COMMAND = """
from farcall.cli import main
sys.exit(main())
"""


def test_farcall_works_without_click_rich_and_numpy_and_refuses_arrays(tmp_path: Path) -> None:
    script = tmp_path / "works.py"
    script.write_text(HIDDEN + WORKS)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    said = "100000\n1\nan array, and numpy is not installed here\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr


@pytest.mark.parametrize("lacks", ["click", "rich"])
def test_the_command_line_says_how_to_install_missing_packages(lacks: str) -> None:
    hidden = f"import sys; sys.modules['{lacks}'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + COMMAND, "doctor", "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: the farcall command needs {lacks}, which is not installed. "
        "Install it with: pip install 'farcall[cli]'\n"
    )


def test_dependencies_of_farcall_are_those_that_it_needs() -> None:
    names = {re.split(r"\W", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"torch", "cloudpickle", "cryptography", "msgspec", "tblib"}
