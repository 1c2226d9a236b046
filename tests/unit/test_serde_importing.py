"""Functions of a module that is being imported at the moment when they are called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE

from farcall.serde.functions import resolve

SOURCE = """
import farcall_test_gate as gate

def early(): pass

gate.begun.set()
assert gate.go_on.wait(300)

def late(): pass
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Holds up the import of module `farcall_test_slow` in the middle."""
    made = SimpleNamespace(begun=threading.Event(), go_on=threading.Event())
    monkeypatch.setitem(sys.modules, "farcall_test_gate", made)
    (tmp_path / "farcall_test_slow.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield made
    made.go_on.set()
    sys.modules.pop("farcall_test_slow", None)


def test_function_that_is_not_defined_yet_is_waited_for(gate: SimpleNamespace) -> None:
    found: list[Callable[..., object]] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve("farcall_test_slow:late")))
        for _ in range(4)
    ]
    threads[0].start()
    assert gate.begun.wait(PATIENCE)
    for thread in threads[1:]:
        thread.start()
    gate.go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert [function.__name__ for function in found] == ["late"] * 4


def test_function_that_is_defined_already_is_not_waited_for(gate: SimpleNamespace) -> None:
    importing = threading.Thread(target=lambda: resolve("farcall_test_slow:late"))
    importing.start()
    assert gate.begun.wait(PATIENCE)
    assert resolve("farcall_test_slow:early").__name__ == "early"
    gate.go_on.set()
    importing.join(PATIENCE)
