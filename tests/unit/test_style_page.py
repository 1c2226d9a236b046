"""docs/style.md names classes that exist; in `src` a class has a name of its own."""

from __future__ import annotations

import ast
import re
from collections import Counter
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


def repeated(sources: list[str]) -> set[str]:
    """Return the names that several classes of these modules have."""
    trees = map(ast.parse, sources)
    classes = Counter(one.name for tree in trees for one in tree.body if type(one) is ast.ClassDef)
    return {name for name, count in classes.items() if count > 1}


def test_each_class_has_a_name_of_its_own() -> None:
    found = repeated([path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")])
    assert sorted(found) == [], "docs/style.md, Names: several classes have that name"


def test_a_repeated_name_is_found() -> None:
    assert repeated(["class A: ...\nclass B: ...", "class B(A): ..."]) == {"B"}
