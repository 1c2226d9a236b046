"""docs/threads.md lists the locks of farcall, each by the class or the module that has it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farcall"
PROGRAMS = {"demos", "testing"}  # their locks are their own
KINDS = {"Lock", "RLock", "Condition"}


def locks_in(source: str, module: str) -> Iterator[str]:
    """Give the locks that a module makes and keeps, as `Class.attribute` or `module.name`."""
    tree = ast.parse(source)
    for part in tree.body:
        if isinstance(part, ast.ClassDef):
            yield from (f"{part.name}.{name}" for name in _made(ast.walk(part)))
        else:
            yield from (f"{module}.{name}" for name in _made([part]))


def _made(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Assign(targets=[target], value=ast.Call(func=made)):
                pass
            case ast.AnnAssign(target=target, value=ast.Call(func=made)):
                pass
            case _:
                continue
        if not (isinstance(made, ast.Attribute) and made.attr in KINDS):
            continue
        if isinstance(target, ast.Attribute):
            yield target.attr
        elif isinstance(target, ast.Name) and target.id.startswith("_"):
            yield target.id  # of a class or a module, not of a function


def named_in(page: str) -> set[str]:
    """Return the locks in the first column of the table."""
    table = page.partition("| lock | guards |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`([\w.]+\.\w+)`", row)}


def test_each_lock_has_its_place_in_the_table_and_the_table_has_no_others() -> None:
    named = named_in((ROOT / "docs" / "threads.md").read_text("utf-8"))
    found: set[str] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        if PROGRAMS.isdisjoint(path.relative_to(PACKAGE).parts):
            module = path.parent.name if path.stem == "__init__" else path.stem
            found.update(locks_in(path.read_text("utf-8"), module))
    assert len(found) > 50
    assert sorted(found - named) == [], "docs/threads.md, Locks: the table lacks these"
    assert sorted(named - found) == [], "docs/threads.md, Locks: no class has these any more"


def test_locks_are_found() -> None:
    source = (
        "import threading\n"
        "_starting = threading.Lock()\n"
        "class A:\n"
        "    _all = threading.RLock()\n"
        "    def __init__(self):\n"
        "        self._changed: object = threading.Condition()\n"
        "        bell = threading.Lock()\n"
        "        self._other = threading.Event()\n"
    )
    assert {*locks_in(source, "m")} == {"m._starting", "A._all", "A._changed"}
