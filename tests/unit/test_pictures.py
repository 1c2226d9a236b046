"""The pictures of the code in the pages are current: layers, units, modules, machines."""

from __future__ import annotations

import ast
import re
from enum import Enum
from pathlib import Path

import pytest
from layers import LAYERS, TREES
from pictures import DOCS, PAGES, PART, PARTS, described, machines, modules, parse_table, renewed

from farcall.protocol import connecting, passes, ref_entries

GENERATED = [page for page in PAGES if PART.search(page.read_text("utf-8"))]
MACHINES = DOCS / "machines.md"


def docstring_of(module: str) -> str:
    return ast.get_docstring(TREES[f"farcall.protocol.{module}"], clean=False) or ""


def with_docstring(module: str, docstring: str) -> dict[str, ast.Module]:
    """Return the modules of farcall, one of them with another docstring."""
    return {**TREES, f"farcall.protocol.{module}": ast.parse(repr(docstring))}


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_page_is_current(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == renewed(text), f"{page.name} is not current: run `make pictures`"


def test_each_part_is_on_one_page() -> None:
    found = [match[1] for page in GENERATED for match in PART.finditer(page.read_text("utf-8"))]
    assert sorted(found) == sorted(PARTS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "RUNNING    cancel                 RUNNING ",
            "RUNNING    cancel                 FINISHED",
        ),
        ("RUNNING    cancel  ", "RUNNING    cancels "),
        ("CALL-3  An abandoned call is", "CALL-3  An abandoned call is not"),
    ],
)
def test_changed_docstring_is_noticed(old: str, new: str) -> None:
    docstring = docstring_of("calls")
    assert docstring.count(old) == 1
    text = MACHINES.read_text("utf-8")
    assert renewed(text, with_docstring("calls", docstring.replace(old, new))) != text


def test_changed_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "design.md").read_text("utf-8")
    monkeypatch.setitem(LAYERS, "optim", 9)
    assert renewed(text) != text


def test_new_import_is_noticed() -> None:
    text = (DOCS / "design.md").read_text("utf-8")
    changed = {"farcall.wire.fresh": ast.parse("from farcall.threads import Thread")}
    assert renewed(text, {**TREES, **changed}) != text


def test_new_package_is_on_the_map() -> None:
    fresh = {
        "farcall.serde.fresh": ast.parse('"""Make bread.\n\nEarly."""'),
        "farcall.serde.fresh.oven": ast.parse('"""Bake."""'),
    }
    added = set(modules({**TREES, **fresh}).splitlines()) - set(modules().splitlines())
    assert added == {"| `serde/fresh/` | Make bread. |"}


def test_new_machine_has_its_section_by_itself() -> None:
    docstring = "Open and close.\n\nDOR-1  A door is opened once."
    section = "## Door\n\n[`protocol/door.py`](../src/farcall/protocol/door.py): Open and close."
    text = machines(with_docstring("door", docstring))
    assert f"{section}\n\n- **DOR-1** A door is opened once.\n\n" in text


TABLE = """\
    state  event     next  effect
    -----  --------  ----  ------
    -      made      SHUT
    SHUT   open      OPEN  air;
                           light
    any    open      same
    OPEN   shut,     SHUT
             locked
    OPEN   slam      SHUT"""


def test_table_becomes_diagram_and_table() -> None:
    assert described(TABLE) == (
        "```mermaid\n"
        "stateDiagram-v2\n"
        "    [*] --> SHUT: made\n"
        "    SHUT --> OPEN: open\n"
        "    OPEN --> SHUT: shut, locked<br/>slam\n"
        "```\n"
        "\n"
        "| state | event | next | effect |\n"
        "| --- | --- | --- | --- |\n"
        "| - | made | SHUT |  |\n"
        "| SHUT | open | OPEN | air; light |\n"
        "| any | open | same |  |\n"
        "| OPEN | shut, locked | SHUT |  |\n"
        "| OPEN | slam | SHUT |  |"
    )


def test_sloppy_table_is_refused() -> None:
    with pytest.raises(ValueError, match="does not keep to the columns"):
        parse_table(TABLE.replace("slam     ", "slam much"))
    with pytest.raises(ValueError, match="no state of the table: AJAR"):
        parse_table(TABLE.replace("slam      SHUT", "slam      AJAR"))
    with pytest.raises(ValueError, match=r"farcall\.protocol\.calls: this row"):
        machines(with_docstring("calls", f"Open.\n\n{TABLE}".replace("slam     ", "slam much")))


@pytest.mark.parametrize(
    ("module", "states", "others"),
    [
        ("connecting", connecting.State, set()),
        ("passes", passes.PassState, {"OVER", "FAILED"}),
        ("refs", ref_entries.HeldState, set()),
    ],
)
def test_table_has_the_states_of_the_code(
    module: str, states: type[Enum], others: set[str]
) -> None:
    blocks = docstring_of(module).split("\n\n")
    table = next(parse_table(block) for block in blocks if block.startswith("    state "))
    assert {*table.states} == {*states.__members__} | others


def test_invariants_named_in_docs_exist() -> None:
    defined = set(re.findall(r"^- \*\*(.+?)\*\*", MACHINES.read_text("utf-8"), re.MULTILINE))
    families = "|".join({name.partition("-")[0] for name in defined})
    for page in DOCS.rglob("*.md"):
        named = set(re.findall(rf"\b(?:{families})-\d+\b", page.read_text("utf-8")))
        assert named <= defined, page.name
