"""Private names of torch in the sources: how they are found, and which names are not torch's.

A private name is one with a leading underscore, but not one like `__dict__`. It is farcall's own if
a module of farcall defines it. Where instances of torch's classes have the same name, it is ours
only if the module that uses it defines it, and uses it of `self` or of a class of its own. It is
another package's if OF_OTHERS has it. Every other private name is taken for one of torch's, since
no type tells whose `value._version` is.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
import torch.fx

from farcall.torch_internals.table import TABLE, PathKind

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "farcall"
# It may use private names of torch: it is there for them.
HOME = PACKAGE / "torch_internals"

# Private names that are not torch's, and no module of farcall defines.
OF_OTHERS = frozenset(
    {
        *("_asdict", "_fields", "_replace"),  # named tuples
        *("_member_map_", "_name_", "_value_", "_value2member_map_"),  # enumerations
        "_metadata",  # SyntaxError, since Python 3.14
        *("_current_frames", "_getframe"),  # sys
        *("_callback", "_read_from_self", "_ready", "_run_once", "_scheduled"),  # asyncio
        "_exit",  # os, and the C library
        "_ALERT_",  # OpenSSL: a part of its reasons
        *("_inheriting", "_run_exitfuncs", "_shutdown"),  # multiprocessing, atexit, threading
        *("_dynamic_class_reduce", "_dynamic_function_reduce"),  # cloudpickle
        *("_pthread_cleanup_pop", "_pthread_cleanup_push"),  # the C library
        *("_async", "_OTHER"),  # texts: the end of names of methods, a value of OpenTelemetry
        "_farcall_reference",  # farcall's, on tensors
    }
)

_PRIVATE = re.compile(r"_(?!_)\w*\Z|__\w*(?<!__)\Z")
_DOTTED = re.compile(r"\.?[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_WITHIN_TEXT = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w+")
_CPP_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


@dataclass(frozen=True)
class Use:
    """A use of a private name: its line, and the name, as far as it is known."""

    line: int
    name: str


def is_private(name: str) -> bool:
    """Return whether a name has a leading underscore, and is no name like `__init__` or `_`."""
    return _PRIVATE.match(name) is not None and name.strip("_") != ""


def _has_private_part(dotted: str) -> bool:
    return any(is_private(part) for part in dotted.split("."))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Return the private names that a module defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or ""
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is_self(node.value):
                yield node.attr
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__slots__":
            yield from ast.literal_eval(node.value)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _classes(tree: ast.AST) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


@functools.cache
def names_of_instances() -> set[str]:
    """Return the private names that instances of torch's classes have."""
    parameter = torch.nn.Parameter(torch.ones(1))
    distributed = torch.distributed
    instances: tuple[object, ...] = (
        *(parameter, torch.nn.Linear(1, 1), torch.optim.SGD([parameter]), torch.futures.Future),
        *((parameter * 1).grad_fn, parameter.untyped_storage(), torch.TypedStorage),
        *(torch.fx.Graph(), torch.fx.Node, torch.fx.GraphModule, torch.Generator(), torch.Size),
        *(torch.jit.ScriptModule(), torch.jit.ScriptFunction, torch.autograd.Function),
        *(distributed.ProcessGroup, distributed.Store, distributed.Work, distributed.P2POp),
        torch.nn.parallel.DistributedDataParallel,
    )
    in_table = {entry.attribute for entry in TABLE.values() if entry.kind is PathKind.OF_INSTANCES}
    return in_table.union(name for one in instances for name in dir(one) if is_private(name))


class _Finder(ast.NodeVisitor):
    """Finds the uses in one module."""

    def __init__(self, tree: ast.Module, own: Collection[str], of_farcall: Collection[str]) -> None:
        self.found: list[Use] = []
        self._own = own
        self._of_farcall = of_farcall
        self._paths: dict[str, str] = {}  # of names: the dotted path in torch that they stand for
        self._texts = set(_docstrings(tree))
        self._selves = {"self", "cls", *_classes(tree)}
        self._bind(tree)
        self.visit(tree)

    def _bind(self, tree: ast.Module) -> None:
        """Note which names stand for something of torch, until no more are found."""
        while True:
            before = len(self._paths)
            for node in ast.walk(tree):
                self._bind_one(node)
            if len(self._paths) == before:
                return

    def _bind_one(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound = alias.name if alias.asname else "torch"
                    self._paths.setdefault(alias.asname or "torch", bound)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] == "torch":
                for alias in node.names:
                    path = f"{node.module}.{alias.name}"
                    self._paths.setdefault(alias.asname or alias.name, path)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            self._bind_target(node.target, node.value)

    def _bind_target(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            path = self._path(value)
            if path is not None:
                self._paths.setdefault(target.id, path)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._bind_target(one, its)

    def _path(self, node: ast.expr | None) -> str | None:
        """Return the dotted path in torch of an expression, or None if it is not one."""
        if isinstance(node, ast.Name):
            return self._paths.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._path(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.IfExp):
            return self._path(node.body) or self._path(node.orelse)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cast":
            return self._path(node.args[-1])
        return None

    def _note(self, node: ast.AST, name: str) -> None:
        self.found.append(Use(getattr(node, "lineno", 0), name))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch" and _has_private_part(alias.name):
                self._note(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            if path.startswith("torch") and _has_private_part(path):
                self._note(node, path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None:
            if _has_private_part(path):
                self._note(node, path)
        else:
            if is_private(node.attr) and not self._is_ours(node.attr, self._is_self(node.value)):
                self._note(node, f"?.{node.attr}")
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node not in self._texts:
            for name in _names_in(node.value):
                if not self._is_ours(name, True):
                    self._note(node, name)

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._selves

    def _is_ours(self, name: str, of_self: bool) -> bool:
        if name in OF_OTHERS:
            return True
        if name in names_of_instances():
            return of_self and name in self._own
        return name in self._own or name in self._of_farcall


def _names_in(text: str) -> Iterator[str]:
    """Return the names in a string that may be private ones of torch."""
    if _DOTTED.match(text):
        if _has_private_part(text) and not text.startswith(("farcall.", "FARCALL")):
            yield text
    else:
        yield from _WITHIN_TEXT.findall(text)


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Return the strings that are statements: docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def defined_in(tree: ast.AST) -> frozenset[str]:
    """Return the private names that a module defines."""
    return frozenset(name for name in _defined(tree) if is_private(name))


def uses_in(tree: ast.Module, of_farcall: Collection[str] = ()) -> list[Use]:
    """Return the private names of torch that a module uses.

    Args:
        tree: the module.
        of_farcall: the private names that farcall's modules define.
    """
    return _Finder(tree, defined_in(tree), of_farcall).found


def uses_in_cpp(source: str) -> list[Use]:
    """Return the private names of torch in the strings of a C++ source.

    Names of symbols of libtorch are mangled, and are no names of Python.
    """
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        for text in _CPP_STRING.findall(line):
            names = [] if text.startswith("_Z") else list(_names_in(text))
            found += [Use(number, name) for name in names]
    return found
