"""A guardian is there before the process whose group it is to kill."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path
from typing import Any

import pytest

from farcall.processes import remote

PACKAGE = Path(__file__).parents[2] / "src" / "farcall"
MAKES_BOTH = {"processes/remote.py": ["main"], "ray/worker.py": ["run"]}


def calls_in(function: ast.AST) -> list[str]:
    """Return the names of what a function calls, in the order of lines."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: call.lineno)
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]


def test_each_function_that_makes_a_guardian_makes_it_before_it_starts_a_process() -> None:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            calls = calls_in(node)
            if {"Guardian", "start"} <= {*calls}:
                assert calls.index("Guardian") < calls.index("start"), f"{path}: {node.name}"
                found.setdefault(path.relative_to(PACKAGE).as_posix(), []).append(node.name)
    assert found == MAKES_BOTH


def test_a_guardian_is_there_before_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it, since a far end that is killed at once would leave what its worker has started."""
    told: list[str] = []

    class Guardian:
        def __init__(self) -> None:
            told.append("guardian")

        def watch(self, leader: int) -> None:
            told.append(f"watches {leader}")

        def release(self, leader: int) -> None:
            told.append(f"releases {leader}")

        def close(self) -> None:
            told.append("closes")

    class Worker:
        pid = 7

    def start(command: list[str], *_: Any, **__: Any) -> Worker:
        told.append(" ".join(command))
        return Worker()

    monkeypatch.setattr(remote, "Guardian", Guardian)
    monkeypatch.setattr(remote, "start", start)
    monkeypatch.setattr(remote, "signal_group", lambda *_: None)
    monkeypatch.setattr(remote, "wait_for_group", lambda _: told.append("ended") or 3)  # type: ignore[func-returns-value]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([["program"], {}]) + "\n"))
    assert remote.main() == 3
    assert told == ["guardian", "program", "watches 7", "ended", "releases 7", "closes"]
