"""The layers of docs/design.md: imports go downward only; lower layers don't know everything."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from layers import BESIDE, FILES, LAYERS, PACKAGE, TREES, imports_of, unit_of

MOST_LINES = 450
IMPURE = {
    *("_thread", "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "numpy"),
    *("os", "pickle", "queue", "random", "secrets", "select", "selectors", "signal", "socket"),
    *("ssl", "subprocess", "threading", "time", "torch"),
}


def upward_imports(module: str, tree: ast.AST) -> list[str]:
    """Return the imports of the module that are against the rule."""
    unit = unit_of(module)
    found = []
    for imported in imports_of(tree):
        if imported.partition(".")[0] != "farcall" or unit_of(imported) == unit or unit in BESIDE:
            continue
        if unit_of(imported) in BESIDE or LAYERS[unit_of(imported)] >= LAYERS[unit]:
            found.append(imported)
    return found


def find_cycle(trees: dict[str, ast.Module]) -> list[str] | None:
    """Return modules that import each other in a circle, if there are such."""
    graph = {
        module: {name for name in imports_of(tree) if name in trees and name != module}
        for module, tree in trees.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return None


def test_no_module_is_too_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in FILES}
    long = {path: length for path, length in lengths.items() if length > MOST_LINES}
    assert long == {}, f"split these by responsibility: a module has at most {MOST_LINES} lines"


def roots_of(module: str) -> set[str]:
    return {imported.partition(".")[0] for imported in imports_of(TREES[module])}


def modules_in(*units: str) -> list[str]:
    return [module for module in TREES if unit_of(module) in units]


def test_every_unit_has_a_layer() -> None:
    units = {unit_of(module) for module in TREES}
    unknown = sorted(units - LAYERS.keys() - BESIDE)
    assert unknown == [], "give these a place in LAYERS or BESIDE of tests/layers.py"


def test_imports_go_downward() -> None:
    upward = {module: upward_imports(module, tree) for module, tree in TREES.items()}
    wrong = {module: imported for module, imported in upward.items() if imported}
    assert wrong == {}, (
        "these modules import higher layers (LAYERS in tests/layers.py): let the higher one hand "
        "in what the lower one needs, or move it down"
    )


def test_an_upward_import_is_noticed() -> None:
    sources = {
        "farcall.wire.frames": "import farcall.runtime.agent",
        "farcall.serde.tensors": "from farcall import rpc",
        "farcall.protocol.calls": "from farcall.transport.base import Link",
        "farcall.transport.sockets.endpoint": "def f():\n    from farcall.serde import pickling",
        "farcall.wire.messages": "if TYPE_CHECKING:\n    from farcall.runtime.agent import Agent",
        "farcall.runtime.agent": "if True:\n    from farcall.testing import ManualClock",
    }
    for module, source in sources.items():
        assert upward_imports(module, ast.parse(source)), source


def test_no_modules_import_each_other() -> None:
    assert find_cycle(TREES) is None, "these import each other: move what both need into a third"


def test_a_cycle_is_noticed() -> None:
    there = "if TYPE_CHECKING:\n    from farcall.runtime.agent import Agent"
    back = "from farcall.runtime.context import CallContext"
    changed = {
        "farcall.runtime.context": ast.parse(there),
        "farcall.runtime.agent": ast.parse(back),
    }
    assert set(find_cycle({**TREES, **changed}) or ()) == set(changed)


def test_no_module_imports_farcall_inside_a_function() -> None:
    inside = [
        (module, name)
        for module, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in imports_of(function)
    ]
    own = [one for one in inside if one[1].partition(".")[0] == "farcall"]
    assert own == [], "import at the top of the module; if that makes a cycle, split the module"


@pytest.mark.parametrize("module", modules_in("protocol"))
def test_protocol_has_no_io_threads_clock_or_torch(module: str) -> None:
    impure = sorted(roots_of(module) & IMPURE)
    assert impure == [], f"{module} is a pure machine: `runtime/` does this for it"


@pytest.mark.parametrize("module", modules_in("errors", "ids", "wire", "protocol", "transport"))
def test_layers_below_serde_know_nothing_of_torch(module: str) -> None:
    found = sorted(roots_of(module) & {"torch", "numpy", "pickle", "cloudpickle"})
    assert found == [], f"{module} knows bytes only: `serde/` or `runtime/` does this for it"


def test_only_rpc_sets_the_default_agent() -> None:
    setters = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if "set_default_agent"
        in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    }
    assert setters == {"farcall.rpc", "farcall.runtime.current"}


def test_global_variables_change_only_in_rpc_and_current() -> None:
    """Allow them in compat, too, whose modules stand for some that have such variables."""
    changing = {
        module
        for module, tree in TREES.items()
        if any(isinstance(node, ast.Global) for node in ast.walk(tree))
        and unit_of(module) != "compat"
    }
    assert changing == {"farcall.rpc", "farcall.runtime.current"}
