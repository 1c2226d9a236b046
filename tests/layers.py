"""The layers of farcall, and the imports of its modules, for a test and for a picture of them.

Not in the package, since users of farcall have no use for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "farcall"

# A unit is a module or a package directly under farcall. Units of one layer don't import each
# other; modules of one unit do.
LAYERS = {
    "errors": 0,
    "version": 0,
    "threads": 0,
    "plain": 0,
    "torch_internals": 0,
    "ids": 1,
    "log": 1,
    "processes": 1,
    "wire": 2,
    "_native": 2,  # C++, see native/
    "protocol": 3,
    "transport": 4,
    "serde": 4,
    "runtime": 5,
    "monitor": 6,
    "rref": 6,
    "functions": 6,
    "members": 6,
    "autograd": 7,
    "objects": 7,
    "supervision": 8,
    "nn": 8,
    "optim": 8,
    "rpc": 9,
    "groups": 10,
    "actors": 10,
    "otel": 10,
    "ray": 11,
    "": 11,  # farcall/__init__.py
}
# They stand beside the layers and may import all of them; no layer imports one of these.
BESIDE = {"__main__", "compat", "cli", "demos", "mypy_plugin", "testing"}


def name_of(path: Path) -> str:
    """ "farcall.runtime.agent" for src/farcall/runtime/agent.py."""
    parts = ["farcall", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Stubs stand for compiled modules.
FILES = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]


class Trees(Mapping[str, ast.Module]):
    """The syntax trees of farcall's modules by name, each parsed when it is first asked for."""

    def __init__(self) -> None:
        self._paths = {name_of(path): path for path in FILES}
        self._parsed: dict[str, ast.Module] = {}

    def __getitem__(self, module: str) -> ast.Module:
        if module not in self._parsed:
            self._parsed[module] = ast.parse(self._paths[module].read_text("utf-8"))
        return self._parsed[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


TREES = Trees()


def unit_of(module: str) -> str:
    return f"{module}..".split(".")[1]


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that are imported, also inside functions or for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used in farcall"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in TREES else node.module
        else:
            yield from imports_of(node)
