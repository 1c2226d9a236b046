"""Test the far end of a worker that is started by ssh."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from farcall.processes import remote


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
