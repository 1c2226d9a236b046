"""The layers of docs/design.md: imports go downward only; lower layers don't know everything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "farcall"

# A unit is a module or a package directly under farcall. Units of one layer don't import each
# other; modules of one unit do.
LAYERS = {
    "errors": 0,
    "version": 0,
    "threads": 0,
    "ids": 1,
    "log": 1,
    "wire": 2,
    "_native": 2,  # C++, see native/
    "protocol": 3,
    "transport": 4,
    "serde": 4,
    "runtime": 5,
    "rref": 6,
    "functions": 6,
    "autograd": 7,
    "nn": 8,
    "optim": 8,
    "rpc": 9,
    "": 9,  # farcall/__init__.py
}
# They stand beside the layers and may import all of them; no layer imports one of these.
BESIDE = {"__main__", "compat", "cli", "demos", "testing"}
IMPURE = {
    *("_thread", "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "numpy"),
    *("os", "pickle", "queue", "random", "secrets", "select", "selectors", "signal", "socket"),
    *("ssl", "subprocess", "threading", "time", "torch"),
}


def name_of(path: Path) -> str:
    """ "farcall.runtime.agent" for src/farcall/runtime/agent.py."""
    parts = ["farcall", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Stubs stand for what is compiled.
FILES = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
TREES = {name_of(path): ast.parse(path.read_text()) for path in FILES}


def unit_of(module: str) -> str:
    return f"{module}..".split(".")[1]


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that are imported when this runs, those in functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used in farcall"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in TREES else node.module
        elif isinstance(node, ast.If) and is_type_checking(node):
            for other in node.orelse:
                yield from imports_of(ast.Module([other], []))
        else:
            yield from imports_of(node)


def upward_imports(module: str, tree: ast.AST) -> list[str]:
    """What the module imports against the rule."""
    unit = unit_of(module)
    found = []
    for imported in imports_of(tree):
        if imported.partition(".")[0] != "farcall" or unit_of(imported) == unit or unit in BESIDE:
            continue
        if unit_of(imported) in BESIDE or LAYERS[unit_of(imported)] >= LAYERS[unit]:
            found.append(imported)
    return found


def roots_of(module: str) -> set[str]:
    return {imported.partition(".")[0] for imported in imports_of(TREES[module])}


def modules_in(*units: str) -> list[str]:
    return [module for module in TREES if unit_of(module) in units]


def test_every_unit_has_a_layer() -> None:
    units = {unit_of(module) for module in TREES}
    assert units <= LAYERS.keys() | BESIDE


@pytest.mark.parametrize("module", sorted(TREES))
def test_imports_go_downward(module: str) -> None:
    assert upward_imports(module, TREES[module]) == []


def test_an_upward_import_is_noticed() -> None:
    sources = {
        "farcall.wire.frames": "import farcall.runtime.agent",
        "farcall.serde.tensors": "from farcall import rpc",
        "farcall.protocol.calls": "from farcall.transport.base import Link",
        "farcall.transport.sockets.endpoint": "def f():\n    from farcall.serde import pickling",
        "farcall.runtime.agent": "if True:\n    from farcall.testing import ManualClock",
    }
    for module, source in sources.items():
        assert upward_imports(module, ast.parse(source)), source


def test_imports_for_type_checkers_only_are_exempt() -> None:
    source = "if TYPE_CHECKING:\n    from farcall.runtime.agent import Agent"
    assert upward_imports("farcall.wire.frames", ast.parse(source)) == []


@pytest.mark.parametrize("module", sorted(TREES))
def test_no_module_imports_farcall_inside_a_function(module: str) -> None:
    functions = [
        node
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    inside = [name for function in functions for name in imports_of(function)]
    assert [name for name in inside if name.partition(".")[0] == "farcall"] == []


@pytest.mark.parametrize("module", modules_in("protocol"))
def test_protocol_has_no_io_threads_clock_or_torch(module: str) -> None:
    assert roots_of(module) & IMPURE == set()


@pytest.mark.parametrize("module", modules_in("errors", "ids", "wire", "protocol", "transport"))
def test_layers_below_serde_know_nothing_of_torch(module: str) -> None:
    # For memory that is not cleared first: the standard library has none.
    allowed = {"numpy"} if module == "farcall.transport.sockets.framing" else set()
    assert roots_of(module) & {"torch", "numpy", "pickle", "cloudpickle"} <= allowed


def test_only_rpc_sets_the_default_agent() -> None:
    setters = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if "set_default_agent"
        in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    }
    assert setters == {"farcall.rpc", "farcall.runtime.context"}


def test_global_variables_change_only_in_rpc_and_context() -> None:
    """And in compat, whose modules stand for some that have such variables."""
    changing = {
        module
        for module, tree in TREES.items()
        if any(isinstance(node, ast.Global) for node in ast.walk(tree))
        and unit_of(module) != "compat"
    }
    assert changing == {"farcall.rpc", "farcall.runtime.context"}
