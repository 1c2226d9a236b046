"""What `torch.distributed.nn` is while farcall stands in for it.

`RemoteModule` here is torch's own, which is plain Python, run over farcall's RPC: a program that
expects `state_dict` to raise gets that. The one that does more is `farcall.nn.RemoteModule`.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from torch.distributed.nn.functional import *  # noqa: F403

RemoteModule: Any  # while it is installed


def fresh(name: str) -> ModuleType:
    """A second copy of a module of torch's, which sees what is imported by those names now."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install_remote_module(swap: Any) -> None:
    """Put torch's RemoteModule, over farcall, in its place."""
    name = "torch.distributed.nn.api.remote_module"
    swap.without("_remote_module_non_scriptable")  # made by this one
    module = fresh(name)
    swap.module(name, module)
    swap.attribute(sys.modules[__name__], "RemoteModule", module.RemoteModule)
