"""Putting other objects in the place of torch's, and taking them away again."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_MISSING = object()


class Swap:
    """The replaced objects, in order. Not thread-safe."""

    def __init__(self) -> None:
        self._attributes: list[tuple[Any, str, Any]] = []
        self._items: list[tuple[dict[Any, Any], Any, Any]] = []
        self._dropped: list[str] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Replace or add an attribute of a module."""
        self._attributes.append((owner, name, owner.__dict__.get(name, _MISSING)))
        setattr(owner, name, value)

    def item(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Replace or add an item of a dict."""
        self._items.append((table, key, table.get(key, _MISSING)))
        table[key] = value

    def module(self, name: str, module: ModuleType) -> None:
        """Let a module be the one that is imported by this name, and the parent's attribute.

        Modules below that one, which it has not itself, are those that were there before, or would
        be found there.
        """
        before = sys.modules.get(name, _MISSING)
        self.item(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        self.attribute(sys.modules[parent], last, module)
        if hasattr(before, "__path__"):
            self.attribute(module, "__path__", [*getattr(module, "__path__", ()), *before.__path__])
        prefix = f"{name}."
        for below, found in [pair for pair in sys.modules.items() if pair[0].startswith(prefix)]:
            child = below.removeprefix(prefix)
            if "." not in child and not hasattr(module, child):
                self.attribute(module, child, found)

    def taken(self, module: ModuleType, names: dict[str, Any]) -> None:
        """Note what a module of torch's would have under these names.

        It was imported just now and took them from modules that have been replaced.
        """
        self._attributes += ((module, name, before) for name, before in names.items())

    def without(self, name: str) -> None:
        """Let a module be made again when it is imported next."""
        self._items.append((sys.modules, name, sys.modules.pop(name, _MISSING)))

    def drop(self, name: str) -> None:
        """Let this module, and those below it, be made again at the end, if it is there then."""
        self._dropped.append(name)

    def undo(self) -> None:
        """Put everything back."""
        for name in self._dropped:
            _drop(name)
        self._dropped.clear()
        while self._attributes:
            owner, name, before = self._attributes.pop()
            if before is not _MISSING:
                setattr(owner, name, before)
            elif hasattr(owner, name):
                delattr(owner, name)
        while self._items:
            table, key, before = self._items.pop()
            if before is _MISSING:
                table.pop(key, None)
            else:
                table[key] = before


def _drop(name: str) -> None:
    for known in list(sys.modules):
        if known == name or known.startswith(f"{name}."):
            del sys.modules[known]
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent]).pop(last, None)
