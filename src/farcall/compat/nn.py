"""torch's own modules that are plain Python over RPC, run over farcall's.

One that is imported while farcall stands in for torch sees farcall. Of one that was imported
before, a second copy takes the place. So `RemoteModule` is torch's own: a program that expects
`state_dict` to raise gets that. The one that does more is `farcall.nn.RemoteModule`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from farcall.compat.imports import ImportHook
from farcall.compat.swap import Swap
from farcall.runtime.calls.graph_breaks import module_breaks_graphs
from farcall.torch_internals import generated_modules

PACKAGE = "torch.distributed.nn"
REMOTE_MODULE = "torch.distributed.nn.api.remote_module"
GENERATED = f"{generated_modules}non_scriptable"  # by torch, when it imports that
RREF_PROXY = "torch.distributed.rpc.rref_proxy"


def fresh(name: str) -> ModuleType:
    """Return a second copy of a module of torch's, which imports what has those names now."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated() -> ModuleType:
    """Return the module with remote functions of `RemoteModule`, for workers that lack it."""
    importlib.import_module(REMOTE_MODULE)
    return sys.modules[GENERATED]


def install(swap: Swap, hook: ImportHook) -> None:
    """Let them run over farcall, now or when they are imported."""
    if RREF_PROXY in sys.modules:
        swap.module(RREF_PROXY, fresh(RREF_PROXY))
    else:
        swap.drop(RREF_PROXY)
    if REMOTE_MODULE in sys.modules:
        swap.without(GENERATED)  # made by the one that was imported
        module = fresh(REMOTE_MODULE)
        module_breaks_graphs(module)
        swap.module(REMOTE_MODULE, module)
        swap.attribute(sys.modules[PACKAGE], "RemoteModule", module.RemoteModule)
    else:
        swap.drop(PACKAGE)
        swap.drop(GENERATED)
        # Until torch 2.13 that import is one by name, of a file which torch has just written.
        hook.instead(GENERATED, generated, until=REMOTE_MODULE)
        hook.after(REMOTE_MODULE, module_breaks_graphs)
