"""Remote calls, remote references and gradients across processes for PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from farcall.version import VERSION

__version__ = VERSION
__all__ = ["__version__"]

# Imported when they are first used: `import farcall` itself takes no time.
_MODULES = ("actors", "autograd", "errors", "functions", "nn", "optim", "rpc")
# Imported in the same way; `dir` shows what programs use every day.
_OTHER_MODULES = ("compat", "groups", "monitor", "otel", "testing")
# What else is used by this name, and where it is.
_FROM = {
    **dict.fromkeys(("Handle", "actor", "handle", "spawn"), "actors"),
    "local": "groups",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _OTHER_MODULES:
        return import_module(f"farcall.{name}")
    if name in _FROM:
        return getattr(import_module(f"farcall.{_FROM[name]}"), name)
    raise AttributeError(f"module 'farcall' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *_FROM})
