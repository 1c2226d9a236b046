"""No error is raised from itself: that cycle keeps all frames of its traceback alive."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "farcall"


def name_of(node: ast.expr) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def makers_in(tree: ast.AST) -> Iterator[str]:
    """Give the name of each function whose result is raised from an error that it was given."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=func, args=args), cause=ast.Name(id=cause)):
                if any(isinstance(arg, ast.Name) and arg.id == cause for arg in args):
                    yield name_of(func)


def gives_an_argument_back(function: ast.FunctionDef) -> bool:
    """Return whether a function returns one of its arguments, or a variable that may be one."""
    mine = {arg.arg for arg in function.args.args}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)):
                mine |= {name} if value in mine else set()
    returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return any(isinstance(value, ast.Name) and value.id in mine for value in returned)


def wrong_in(trees: list[ast.Module]) -> set[str]:
    makers = {name for tree in trees for name in makers_in(tree)}
    functions = [node for tree in trees for node in ast.walk(tree)]
    return {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef) and node.name in makers
        if gives_an_argument_back(node)
    }


def test_what_is_raised_from_an_error_is_another_one() -> None:
    trees = [ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")]
    assert sum(len(list(makers_in(tree))) for tree in trees) > 10
    assert wrong_in(trees) == set(), (
        "these may give the error back that they were given: have them set the cause of a new one, "
        "and raise their result without `from`"
    )


def test_an_error_that_is_raised_from_itself_is_found() -> None:
    source = """
def explained(error):
    ended = error
    return ended

try:
    f()
except OSError as error:
    raise explained(error) from error
"""
    assert wrong_in([ast.parse(source)]) == {"explained"}
