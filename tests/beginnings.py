"""Programs that begin alike: one process runs the beginning, and a fork of it each program.

Importing torch takes two seconds of a core, and a fork some milliseconds. A beginning may go on
from another one: it is run in a fork of that one's process, and forks in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

# Runs beginnings and programs as `python -c` would: in the namespace of `__main__`. A fork that has
# run a beginning serves in the place of its parent until it is told to leave. A program that has
# come to its end leaves at once: to tear torch down takes as long as to import it.
SERVER = """
def _serve():
    import gc, json, os, sys
    main, requests, answers = vars(sys.modules["__main__"]), os.fdopen(os.dup(0)), os.dup(1)
    del main["_serve"]
    for line in requests:
        what, code, *outputs = json.loads(line)
        if what == "leave":
            break
        if child := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(answers, f"{status}\\n".encode())
            continue
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        exec(code, main)
        if what == "run":
            break
        gc.collect()
        gc.freeze()  # else the collectors of all forks copy what they share
        os.write(answers, b"0\\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

_serve()
"""


class Server:
    """A process that runs code in forks of itself.

    Attributes:
        entered: the beginnings that have been run, each in a fork of the process of the one before.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.entered: list[str] = []

    def be_after(self, beginnings: list[str]) -> None:
        """Have the process be a fork that has run these beginnings, and no others."""
        while self.entered != beginnings[: len(self.entered)]:
            assert self._ask("leave", "") == "0\n"
            self.entered.pop()
        for code in beginnings[len(self.entered) :]:
            assert self._ask("enter", code) == "0\n", "a beginning failed: its stderr says why"
            self.entered.append(code)

    def run(self, program: str) -> object:
        """Return what a program prints, which is JSON; it has to end with 0."""
        with tempfile.TemporaryDirectory() as folder:
            out, errors = Path(folder, "out"), Path(folder, "errors")
            assert self._ask("run", program, str(out), str(errors)) == "0\n", errors.read_text()
            return json.loads(out.read_text())

    def _ask(self, what: str, code: str, *outputs: str) -> str:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        requests.write(json.dumps([what, code, *outputs]) + "\n")
        requests.flush()
        return answers.readline()

    def end(self) -> None:
        self._process.communicate(timeout=PATIENCE)


class Beginning:
    """The code that programs begin with.

    Args:
        code: Python that comes before each of them.
        after: the beginning that this one goes on from.
        environment: of the process, if it is not that of the tests; goes with the first beginning.
    """

    def __init__(
        self,
        code: str,
        after: Beginning | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._codes: list[str] = [*after._codes, code] if after else [code]
        self._first: Beginning = after._first if after else self
        self._environment = environment
        self._server: Server | None = None

    def run(self, program: str) -> object:
        """Return what a program prints, which is JSON; it has to end with 0."""
        first = self._first
        if first._server is None:
            first._server = Server(first._environment)
        first._server.be_after(self._codes)
        return first._server.run(program)

    def end(self) -> None:
        """End the process of this beginning, and of those after it, if there is one."""
        if self._server is not None:
            self._server.end()
            self._server = None


def ends_with_module(beginning: Beginning) -> Any:
    """Return a fixture for a module's global variable: its process ends with the module's tests."""

    @pytest.fixture(scope="module", autouse=True)
    def end() -> Iterator[None]:
        yield
        beginning.end()

    return end
