"""Remote calls, remote references and gradients across processes for PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from farcall.version import VERSION

if TYPE_CHECKING:  # for editors and type checkers: what `__getattr__` gives
    from farcall import actors as actors
    from farcall import autograd as autograd
    from farcall import errors as errors
    from farcall import functions as functions
    from farcall import groups as groups
    from farcall import monitor as monitor
    from farcall import nn as nn
    from farcall import optim as optim
    from farcall import rpc as rpc
    from farcall.actors import Handle as Handle
    from farcall.actors import actor as actor
    from farcall.actors import handle as handle
    from farcall.actors import spawn as spawn
    from farcall.groups.local import local as local

__version__ = VERSION
__all__ = ["__version__"]

# Imported when they are first used: `import farcall` itself takes no time.
_MODULES = ("actors", "autograd", "errors", "functions", "nn", "optim", "rpc")
# Imported in the same way; `dir` shows what programs use every day.
_OTHER_MODULES = ("compat", "groups", "monitor", "otel", "ray", "testing")
# Other names that are used by this module's name, and where they are.
_FROM = {
    **dict.fromkeys(("Handle", "actor", "handle", "spawn"), "actors"),
    "local": "groups",
}


def __getattr__(name: str) -> object:
    if name in _MODULES or name in _OTHER_MODULES:
        return import_module(f"farcall.{name}")
    if name in _FROM:
        return getattr(import_module(f"farcall.{_FROM[name]}"), name)
    raise AttributeError(f"module 'farcall' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *_FROM})
