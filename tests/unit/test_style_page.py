"""docs/style.md names classes that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "docs" / "style.md").read_text("utf-8").partition("## Names")[2]


def test_classes_in_the_table_of_names_exist() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "native").rglob("*.hpp")]
    text = "\n".join(path.read_text("utf-8") for path in files)
    defined = set(re.findall(r"^\s*class (\w+)", text, flags=re.MULTILINE))
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", NAMES))
    assert len(named) > 10
    assert sorted(named - defined) == [], "docs/style.md, Names: no class has these names any more"
