"""Each test shows what it asserts: a reader of the test alone can say what would make it fail.

A test has an `assert` of its own, a `pytest.raises`, `pytest.warns` or `pytest.fail`, or calls a
function whose name says that it checks. A function `train` with an assert inside looks like
preparation, and a test that only trains looks like one that can't fail; so does one that asserts
nothing. A child that is run with `check=True` counts as well, for it may assert.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A test that calls another test checks what that one does.
CHECKS = ("assert", "check", "compare", "test", "wait_until")
OF_PYTEST = {"deprecated_call", "fail", "raises", "warns"}

# Tests whose promise is that nothing is raised, of which there is no state to look at. No name is
# added here: where a test waits for an end, an assert can say in which state that leaves things.
SILENT = {
    "unit/test_agents_sim.py::test_the_code_that_a_mistake_changes_has_that_name",
    "unit/test_future_callbacks.py::test_a_chain_that_no_code_completes_can_be_dropped",
    "unit/test_fuzzing.py::test_target_takes_broken_bytes",
    "unit/test_secrets.py::test_a_secret_that_was_made_by_chance_is_taken",
}


def collected_from(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_test(node.name):
            yield node


def is_test(name: str) -> bool:
    return name.startswith("test")  # as pytest collects


def says_that_it_checks(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="pytest"), attr=attribute):
            return attribute in OF_PYTEST
        case ast.Attribute(attr=name) | ast.Name(id=name):
            is_named = any(name == word or name.startswith(f"{word}_") for word in CHECKS)
            return is_named or any(
                keyword.arg == "check" and ast.unparse(keyword.value) == "True"
                for keyword in call.keywords
            )
    return False


def shows_a_check(test: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and says_that_it_checks(node))
        for node in ast.walk(test)
    )


@functools.cache
def silent_tests() -> set[str]:
    found = set()
    for path in sorted(ROOT.rglob("test_*.py")):
        for test in collected_from(ast.parse(path.read_text(encoding="utf-8"))):
            if not shows_a_check(test):
                found.add(f"{path.relative_to(ROOT).as_posix()}::{test.name}")
    return found


def test_each_test_shows_its_asserts() -> None:
    new = silent_tests() - SILENT
    assert not new, (
        "add an assert, or let the name of the helper that asserts begin with "
        f"{', '.join(CHECKS)}: {', '.join(sorted(new))}"
    )


def test_the_list_of_silent_tests_only_shrinks() -> None:
    gone = SILENT - silent_tests()
    assert not gone, f"these show what they assert now, or are gone: take out {sorted(gone)}"


@pytest.mark.parametrize(
    "code",
    [
        "assert x",
        "with pytest.raises(KeyError): f()",
        "with pytest.warns(UserWarning): f()",
        "check(x)",
        "check_all(x)",
        "helpers.assert_equal(x)",
        "compare(x)",
        "wait_until(lambda: x)",
        "test_other()",
        "subprocess.run(program, check=True)",
        "for x in y:\n        assert x",
    ],
)
def test_sees_checks(code: str) -> None:
    assert shows_a_check(ast.parse(f"def test_it():\n    {code}"))


@pytest.mark.parametrize(
    "code",
    ["f(x)", "checked(x)", "train()", "x.wait()", "subprocess.run(program, check=False)", "pass"],
)
def test_sees_that_there_are_none(code: str) -> None:
    assert not shows_a_check(ast.parse(f"def test_it():\n    {code}"))
