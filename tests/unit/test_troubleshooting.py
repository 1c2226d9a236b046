"""docs/troubleshooting.md has an entry for each exception."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farcall import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


def test_each_exception_has_an_entry_and_there_are_no_others() -> None:
    assert list(ENTRIES) == sorted(errors.__all__)


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_entry_says_what_to_do(name: str) -> None:
    assert len(ENTRIES[name].split()) > 15
