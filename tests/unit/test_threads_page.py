"""docs/threads.md lists the threads of farcall, each by the name with which it is started."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farcall"
PROGRAMS = {"demos", "testing"}  # their threads are their own
# Functions and classes that start threads: which argument is their name, and what they add to it.
STARTS = {
    "FarcallThread": (1, ""),
    "BriefThreads": (0, "_*"),
    "Several": (0, "_*"),
    "uninterrupted": (1, ""),
    "in_a_thread": (1, ""),
    "_Poller": (0, ""),
}
# They start threads with the names that their callers give, which are found there.
PASS_NAMES_ON = {"transport/brief_threads.py", "transport/uninterrupted.py"}
DIFFERS = re.compile(r"NAME|GROUP|(?<![A-Za-z])(?:I|J|N|\d+)(?![A-Za-z])")


def names_in(source: str) -> Iterator[str]:
    """Give the names of the threads that a module starts; `*` is what differs between them."""
    tree = ast.parse(source)
    texts = {name: value for node in ast.walk(tree) for name, value in _assigned(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=starter), args=args) if starter in STARTS:
                index, added = STARTS[starter]
                name = _text(args[index], texts)
                if name is not None:
                    yield name + added


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value):
            if isinstance(value, ast.Constant | ast.JoinedStr):
                yield name, value


def _text(node: ast.expr, texts: dict[str, ast.expr]) -> str | None:
    """Return a name as it is in the source; None if callers give it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, texts) or "*" for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)):  # of an attribute, it is no own text
            return _text(texts[name], texts) if name in texts else None
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _text(texts[name], texts) if name in texts else None
        case _:
            return None


def named_in(page: str) -> set[str]:
    """Return the names in the first columns of the tables."""
    section = page.partition("## The threads of an agent\n")[2].partition("\n### ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    named = {name for cell in cells for name in re.findall(r"`(farcall[^`]+)`", cell)}
    return {DIFFERS.sub("*", name) for name in named}


def test_each_thread_is_in_the_tables_and_the_tables_have_no_others() -> None:
    named = named_in((ROOT / "docs" / "threads.md").read_text("utf-8"))
    found: set[str] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if PROGRAMS.isdisjoint(place.parts) and place.as_posix() not in PASS_NAMES_ON:
            found.update(names_in(path.read_text("utf-8")))
    assert len(found) > 30
    assert sorted(found - named) == [], "docs/threads.md: the tables of threads lack these"
    assert sorted(named - found) == [], "docs/threads.md: no module starts these threads any more"


def test_names_of_threads_are_found() -> None:
    source = (
        "_NAME = 'farcall-doctor'\n"
        "FarcallThread(run, f'farcall-{self._name}-{number}')\n"
        "def start(self):\n"
        "    name = f'farcall {group.scheme} {rank}'\n"
        "    FarcallThread(self._read, f'{name} in')\n"
        "    Several(_NAME, works, 3)\n"
        "    uninterrupted(step, name)\n"
        "    FarcallThread(run, of_the_caller)\n"
    )
    names = {"farcall-*-*", "farcall * * in", "farcall-doctor_*", "farcall * *"}
    assert {*names_in(source)} == names


def test_names_in_the_tables_are_read() -> None:
    page = (
        "## The threads of an agent\n\n| name | does |\n|---|---|\n"
        "| `farcall-send-NAME_N`, `farcall-put-NAME` | `farcall status` |\n"
        "| `farcall GROUP I-J in` | |\n| `farcall-roll-call-NAME_1` to `_8` | |\n\n### Else\n"
    )
    names = {"farcall-send-*_*", "farcall-put-*", "farcall * *-* in", "farcall-roll-call-*_*"}
    assert named_in(page) == names
