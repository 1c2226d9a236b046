"""Tests with real processes: see `crew`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crew import Crew, assembled


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with assembled(f"{tmp_path}/store") as made:
        yield made
