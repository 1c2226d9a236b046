"""Attacks on real workers in real processes: each must fail.

Each test is named in a cell of the table in `docs/security.md`. An attacker's knowledge of
farcall's insides is in `attacker.py` alone. The members are those of `tests/process/crew.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The members of a crew are forked from a server that gets this path, too.
sys.path[:0] = [str(HERE), str(HERE.parent / "process")]

from crew import Crew, assembled  # noqa: E402


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with assembled(f"{tmp_path}/store") as made:
        yield made


@pytest.fixture(scope="module", params=["native", "socket"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        pytest.importorskip("farcall._native")
    return str(request.param)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Return the path of a file that only an attacker's code makes."""
    return tmp_path / "sprung"
