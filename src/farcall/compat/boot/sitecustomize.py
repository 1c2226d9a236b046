"""Lets farcall stand in for torch.distributed.rpc in a Python process, as soon as it imports torch.

`farcall launch --compat` puts the folder of this file first on PYTHONPATH, so Python runs it when
it starts, also in every Python process that the program starts. It acts where FARCALL_COMPAT is 1.
A `sitecustomize` that this one hides still gets its turn.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _ThenInstall(Loader):
    """Loads torch as its own loader does, and then installs farcall."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        importlib.import_module("farcall.compat").install()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _TorchFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenInstall(spec.loader)
        return spec


def _run_hidden() -> None:
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("FARCALL_COMPAT") == "1":
    sys.meta_path.insert(0, _TorchFinder())
_run_hidden()
