"""Changes to torch's modules when they are imported, and not before.

A program that uses no optimizer does not pay for `torch.distributed.optim`, which takes a second
to import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

After = Callable[[ModuleType], None]
Instead = Callable[[], ModuleType]


class ImportHook(MetaPathFinder):
    """Acts when one of some modules is imported. Everything else it leaves to the other finders."""

    def __init__(self) -> None:
        self._after: dict[str, After] = {}
        self._instead: dict[str, tuple[Instead, str | None]] = {}
        self._executing = _Executing()

    def after(self, name: str, act: After) -> None:
        """Call this with the module: when it was imported, or at once if it is there already."""
        module = sys.modules.get(name)
        if module is None:
            self._after[name] = act
        else:
            act(module)

    def instead(self, name: str, make: Instead, *, until: str | None = None) -> None:
        """Let this give the module that is imported by a name.

        Args:
            name: of the module.
            make: returns the module.
            until: a module whose own code may import `name` and mean torch's. While a thread runs
                that code, the hook leaves `name` to the other finders in that thread.
        """
        self._instead[name] = make, until
        if until is not None:
            self._after.setdefault(until, lambda _: None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the modules named before, None for all others."""
        make, until = self._instead.get(fullname, (None, None))
        if make is not None and until not in self._executing.names:
            return importlib.util.spec_from_loader(fullname, _Instead(make))
        act = self._after.get(fullname)
        if act is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _After(spec.loader, act, self._executing)
                return spec
        return None

    def begin(self) -> None:
        """Act from now on."""
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Act no more."""
        sys.meta_path.remove(self)
        self._after.clear()
        self._instead.clear()


class _Executing(threading.local):
    """The modules whose code runs in this thread, of those that `_After` loads."""

    def __init__(self) -> None:
        self.names: set[str | None] = set()


class _After(Loader):
    """Loads a module as its own loader does, and then acts."""

    def __init__(self, loader: Loader, act: After, executing: _Executing) -> None:
        self._loader = loader
        self._act = act
        self._executing = executing

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        names = self._executing.names
        names.add(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            names.discard(module.__name__)
        self._act(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Instead(Loader):
    """Puts another module in the place of the one that is imported."""

    def __init__(self, make: Instead) -> None:
        self._make = make

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what it finds there afterwards, and keeps it.
        sys.modules.pop(module.__name__)
        sys.modules[module.__name__] = self._make()
