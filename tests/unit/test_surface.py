"""The first steps of a newcomer in an interpreter or a shell."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from beginnings import Beginning, ends_with_module
from patience import PATIENCE

import farcall

# Without farcall: each program imports it first, as a newcomer does.
beginning = Beginning("import json, torch")
end = ends_with_module(beginning)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=PATIENCE
    )


def test_modules_are_there_after_import_farcall() -> None:
    code = "import farcall; print(farcall.rpc.rpc_sync.__name__, farcall.optim.__name__)"
    assert run("-c", code).stdout.split() == ["rpc_sync", "farcall.optim"]


def test_type_checkers_and_editors_know_names_that_are_imported_at_first_use() -> None:
    block = next(
        node
        for node in ast.parse(Path(farcall.__file__).read_text()).body
        if isinstance(node, ast.If)
    )
    known = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted([*known, "__version__"]) == sorted({*dir(farcall), "groups", "monitor"})
    for name, module in known.items():
        assert getattr(import_module(module or ""), name) is getattr(farcall, name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert "has no attribute 'rcp'" in run("-c", "import farcall; farcall.rcp").stderr


PUBLIC = ("autograd", "compat", "errors", "functions", "nn", "optim", "rpc", "testing")


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_shows_the_public_names(name: str) -> None:
    module = import_module(f"farcall.{name}")
    for submodule in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not submodule.name.startswith("_"):
            import_module(f"farcall.{name}.{submodule.name}")  # adds an attribute to the package
    exceptions = [name for name, value in vars(module).items() if isinstance(value, type)]
    assert dir(module) == sorted(getattr(module, "__all__", exceptions))
    assert [name for name in dir(module) if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_module_is_there_after_import_farcall(name: str) -> None:
    code = f"import farcall; print(json.dumps(farcall.{name}.__name__))"
    assert beginning.run(code) == f"farcall.{name}"


def test_python_m_farcall_is_the_command() -> None:
    assert "demo" in run("-m", "farcall", "--help").stdout
