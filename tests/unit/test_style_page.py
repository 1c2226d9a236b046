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


# Names that several classes had when they were first counted. The list only gets shorter.
SEVERAL = {
    *("Answer", "Arrival", "Call", "Candidate", "Channel", "Contexts", "Failure", "Found", "Gate"),
    *("Gradients", "Group", "Hello", "Kind", "Limits", "Member", "Membership", "Place", "Plan"),
    *("Ready", "Recorded", "Search", "Silent", "Span", "State", "Turns", "Wait", "Watch", "Writer"),
    "_Chain",
}


def repeated(sources: list[str]) -> set[str]:
    """Return the names that several classes of these modules have."""
    trees = map(ast.parse, sources)
    classes = Counter(one.name for tree in trees for one in tree.body if type(one) is ast.ClassDef)
    return {name for name, count in classes.items() if count > 1}


def test_a_new_class_has_a_name_of_its_own() -> None:
    paths = [path for path in (ROOT / "src").rglob("*.py") if "demos" not in path.parts]
    found = repeated([path.read_text("utf-8") for path in paths])
    assert sorted(found - SEVERAL) == [], "docs/style.md, Names: another class has that name"
    assert sorted(SEVERAL - found) == [], "one class each now: take these out of SEVERAL"


def test_a_repeated_name_is_found() -> None:
    assert repeated(["class A: ...\nclass B: ...", "class B(A): ..."]) == {"B"}
