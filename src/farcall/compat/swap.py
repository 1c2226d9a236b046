"""Putting other objects in the place of torch's, and taking them away again."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_MISSING = object()


class Swap:
    """What was replaced, in order. Not thread-safe."""

    def __init__(self) -> None:
        self._attributes: list[tuple[Any, str, Any]] = []
        self._items: list[tuple[dict[Any, Any], Any, Any]] = []

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

        Modules below that one, which it has not itself, are those that were there before.
        """
        before = sys.modules.get(name, _MISSING)
        self.item(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        self.attribute(sys.modules[parent], last, module)
        if hasattr(before, "__path__") and not hasattr(module, "__path__"):
            self.attribute(module, "__path__", before.__path__)
        for below, found in list(sys.modules.items()):
            if below.rpartition(".")[0] == name and not hasattr(module, below.rpartition(".")[2]):
                self.attribute(module, below.rpartition(".")[2], found)

    def without(self, name: str) -> None:
        """Let a module be made again when it is imported next."""
        self._items.append((sys.modules, name, sys.modules.pop(name, _MISSING)))

    def undo(self) -> None:
        """Put everything back."""
        while self._attributes:
            owner, name, before = self._attributes.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        while self._items:
            table, key, before = self._items.pop()
            if before is _MISSING:
                table.pop(key, None)
            else:
                table[key] = before
