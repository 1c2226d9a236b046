"""The table of `docs/security.md` has a cell for each attacker and setting, and tests for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ATTACKS = ROOT / "tests" / "attacks"

# Tests of the attackers' own tools: they say nothing about a worker.
OF_THE_TOOLS = {"test_the_bytes_of_a_stranger_are_a_pickle_that_would_run"}
# The text of the page has the effects of right settings, and the errors of wrong ones.
OF_THE_TEXT = {
    "test_one_machine_needs_no_setting",
    "test_two_hosts_with_a_secret",
    "test_two_hosts_with_certificates",
    "test_worker_that_runs_uses_certificates_that_were_replaced",
    "test_wrong_variable_of_the_environment_is_named",
}


def rows(name: str) -> list[list[str]]:
    """Return the cells of the table behind `<!-- name -->`, without its heading."""
    table = PAGE.partition(f"<!-- {name} -->\n\n")[2].partition("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def names_of_tests(folder: Path) -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("test_*.py")]
    return {
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_cell_of_the_matrix_leads_to_a_row_and_every_row_is_led_to() -> None:
    matrix = rows("matrix")
    assert len(matrix) == 7
    assert {len(row) for row in matrix} == {7}
    cited = [re.findall(r"\((\d+)\)", cell) for row in matrix for cell in row[1:]]
    assert [found for found in cited if len(found) != 1] == []
    assert {number for (number,) in cited} == {row[0] for row in rows("cells")}


def test_every_row_names_tests_that_exist() -> None:
    known = names_of_tests(ROOT / "tests")
    for number, _, _, shown_by in rows("cells"):
        named = re.findall(r"`(test_\w+)`", shown_by)
        assert named, number
        assert [name for name in named if name not in known] == []


def test_every_attack_is_named_on_the_page() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert names_of_tests(ATTACKS) - named - OF_THE_TOOLS - OF_THE_TEXT == set()
