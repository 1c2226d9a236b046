"""Programs that begin alike: one process runs the beginning, and a fork of it each program.

Importing torch takes two seconds of a core, and a fork some milliseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

# Runs the beginning and each program as `python -c` would: in the namespace of `__main__`.
SERVER = """
def _serve():
    import json, os, sys
    main, requests, answers = vars(sys.modules["__main__"]), os.fdopen(os.dup(0)), os.dup(1)
    del main["_serve"]
    exec(sys.argv[1], main)
    for line in requests:
        program, *outputs = json.loads(line)
        if (child := os.fork()) == 0:
            for number, path in enumerate(outputs, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            exec(program, main)
            break
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{status}\\n".encode())

_serve()
"""


class Beginning:
    """The code that programs begin with."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._process: subprocess.Popen[str] | None = None

    def run(self, program: str) -> object:
        """Return what a program prints, which is JSON; it has to end with 0."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", SERVER, self._code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with tempfile.TemporaryDirectory() as folder:
            out, errors = Path(folder, "out"), Path(folder, "errors")
            requests.write(json.dumps([program, str(out), str(errors)]) + "\n")
            requests.flush()
            status = answers.readline()
            assert status == "0\n", errors.read_text() if errors.exists() else "it has not begun"
            return json.loads(out.read_text())

    def end(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=PATIENCE)
            self._process = None


def ends_with_module(beginning: Beginning) -> Any:
    """Return a fixture for a module's global variable: its process ends with the module's tests."""

    @pytest.fixture(scope="module", autouse=True)
    def end() -> Iterator[None]:
        yield
        beginning.end()

    return end
