"""A notebook starts its workers with `farcall.local`: its cells, run by a Jupyter kernel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")


def run(cells: Sequence[str], folder: Path) -> list[str]:
    """Run a notebook; return the output of each cell, what it prints and its last value."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in cells])
    kernel = manager.KernelManager()
    kernel.kernel_spec.argv = [
        sys.executable,
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
    ]
    patience = int(PATIENCE)
    client = nbclient.NotebookClient(
        notebook,
        km=kernel,
        timeout=patience,
        startup_timeout=patience,
        iopub_timeout=patience,  # what comes later than that is left out
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return ["".join(map(text_of, cell.outputs)) for cell in notebook.cells]


def text_of(output: Any) -> str:
    if output.output_type == "stream":
        return output.text if output.name == "stdout" else ""
    return output.data["text/plain"] + "\n"


def test_a_notebook_has_its_first_result_after_five_lines(tmp_path: Path) -> None:
    """Define a function in a cell, print into the cell, and define the function anew."""
    start = """\
import farcall
group = farcall.local(2)
def double(x): print("doubling", x); return 2 * x
group[1].call(double, 21)
"""
    redefined = """\
def double(x):
    print("twice", x)
    return x + x
group.map(double, [1])
"""
    outputs = run([start, "group[0].call(double, 4)", redefined, "group.close()"], tmp_path)
    plain = [output.replace("\x1b[", "").replace("0m", "") for output in outputs]
    assert [lines.splitlines()[-1] for lines in plain[:3]] == ["42", "8", "[2]"]
    printed = [[line.split("m", 1)[-1] for line in lines.splitlines()[:-1]] for lines in plain[:3]]
    assert printed == [["worker1 | doubling 21"], ["worker0 | doubling 4"], ["worker0 | twice 1"]]
    assert plain[3] == ""
    assert "\x1b[" in outputs[0]  # it has a colour
