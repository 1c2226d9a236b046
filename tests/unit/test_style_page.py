"""docs/style.md names classes that exist; in `src` a class has a name of its own.

Names that were given up for those of docs/style.md do not come back.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "docs" / "style.md").read_text("utf-8").partition("## Names")[2]

# Words of names, and whole names, that docs/style.md has others for.
OLD_WORDS = {
    *("lane", "lanes"),  # stream, or device channel
    *("forget", "forgets", "forgot", "forgotten", "forgettable"),  # discard, close_after_fork
    *("hearer", "hearers"),  # on_peer_lost
    *("lend", "lends", "lent"),  # zero_copy, imported_memory
    *("leaver", "departure"),  # ShutdownCoordinator, TerminationDetector
    *("wakefulness", "joinable", "likeness", "standin", "standins", "outbound"),
}
OLD_NAMES = {
    *("lost", "_lost", "lose", "_lose"),  # loss_cause, on_peer_lost; fail, declare_lost
    *("sink", "sinks", "_Entry"),  # inputs, send and recv nodes
    *("dumped", "Dumped", "Met", "OwnedValue"),  # payload, OutOfBand, HandshakeResult, slot
    *("Outcomes", "StandIns", "stand_in", "contents_of"),
    *("sides_", "side_fd", "add_side", "watch_side", "on_side", "wants_sides", "kSideClosed"),
}
OLD_PHRASES = re.compile(r"\blanes?\b|\bbeside the first\b", re.IGNORECASE)
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


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


def names_of(source: str) -> Iterator[str]:
    """Give the names that a module defines: classes, functions, arguments and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def names_of_cpp(source: str) -> list[str]:
    """Return all names in C++ code, but for those in comments and strings."""
    return re.findall(r"[A-Za-z_]\w*", re.sub(r'//.*|"(?:\\.|[^"\\])*"', "", source))


def old_among(names: set[str]) -> set[str]:
    """Return the names that were given up, or have a word that was."""
    words = {name: {word.lower() for word in WORDS.findall(name)} for name in names}
    return {name for name in names if name in OLD_NAMES or words[name] & OLD_WORDS}


def test_old_names_do_not_come_back() -> None:
    found: dict[str, set[str]] = {}
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.pyi")]:
        found[str(path)] = {path.stem, *names_of(path.read_text("utf-8"))}
    for folder in ("core", "tests", "fuzz"):  # `plain` has the names of DLPack: lanes of SIMD
        for path in (ROOT / "native" / folder).glob("*.?pp"):
            found[str(path)] = {path.stem, *names_of_cpp(path.read_text("utf-8"))}
    assert len(found) > 300
    old = {path: sorted(one) for path, names in found.items() if (one := old_among(names))}
    assert old == {}, "docs/style.md, Names: these have another name now"


def test_old_words_do_not_come_back_in_prose() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]
    code = [*(ROOT / "src").rglob("*.py"), *(ROOT / "native" / "core").glob("*.?pp")]
    texts = {path: OLD_PHRASES.findall(path.read_text("utf-8")) for path in [*pages, *code]}
    assert {str(path): found for path, found in texts.items() if found} == {}


def test_old_names_are_found() -> None:
    source = (
        "class NcclLanes:\n"
        "    lost: str\n"
        "    def forget(self, stand_in):\n"
        "        self._lent = lost = 1\n"
    )
    old = {"NcclLanes", "lost", "forget", "stand_in", "_lent"}
    assert old_among({*names_of(source), "self", "on_peer_lost"}) == old
    cpp = 'void lose(Lane& lane) { stream("sides_ lane"); }  // lane'
    assert old_among(set(names_of_cpp(cpp))) == {"lose", "Lane", "lane"}
