"""_native.pyi names exactly what the C++ module has: type checkers see only the stub."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import farcall

_native = pytest.importorskip("farcall._native", reason="the C++ part is not built")
STUB = Path(farcall.__file__).with_name("_native.pyi")


def described(body: list[ast.stmt], inside: str = "") -> set[str]:
    """Public names in a stub: "f", "Class", "Class.method"."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(inside + node.name)
        if isinstance(node, ast.ClassDef):
            names |= described(node.body, f"{inside}{node.name}.")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(inside + node.target.id)
    return {name for name in names if is_public(name)}


def there(holder: object, inside: str = "") -> set[str]:
    """Public names in the module: as `described`."""
    names = set()
    for name, value in vars(holder).items():
        if is_public(name):
            names.add(inside + name)
            if inspect.isclass(value):
                names |= there(value, f"{inside}{name}.")
    return names


def is_public(name: str) -> bool:
    return not name.rpartition(".")[2].startswith("_")


def test_stub_has_the_names_of_the_module() -> None:
    assert described(ast.parse(STUB.read_text()).body) == there(_native)
