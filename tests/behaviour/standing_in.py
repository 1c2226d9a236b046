"""farcall.compat for the behaviour tests. Their agents are started with `quirks=LIKE_TORCH`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

import farcall.compat
from farcall import autograd as farcall_autograd
from farcall import rpc as farcall_rpc
from farcall.compat import autograd as compat_autograd
from farcall.compat import rpc as compat_rpc
from farcall.compat.rpc import api
from farcall.compat.rpc.agents import TensorPipeAgent
from farcall.runtime.agent import Agent
from farcall.runtime.options.backend_options import RpcBackendOptions


@contextmanager
def standing_in(agents: list[Agent]) -> Iterator[None]:
    """Install compat, as if it had started these agents."""
    farcall.compat.install()
    try:
        shown = TensorPipeAgent(agents[0], RpcBackendOptions(), is_static_group=True)
        api._set_and_start_rpc_agent(shown)
        yield
    finally:
        api._reset_current_rpc_agent()
        farcall.compat.uninstall()


def names(ours: ModuleType, theirs: ModuleType) -> ModuleType:
    """Return a module of farcall's with compat's values under the same names."""
    made = ModuleType(ours.__name__)
    vars(made).update({**vars(ours), **{k: v for k, v in vars(theirs).items() if k[:2] != "__"}})
    return made


@contextmanager
def stands_in(agents: list[Agent], *modules: ModuleType) -> Iterator[None]:
    """`standing_in`, and what these modules use as `rpc`, `autograd`, ... is compat's."""
    with standing_in(agents), pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, replacement in (
                ("rpc", names(farcall_rpc, compat_rpc)),
                ("autograd", names(farcall_autograd, compat_autograd)),
                ("RemoteModule", importlib.import_module("torch.distributed.nn").RemoteModule),
            ):
                if hasattr(module, name):
                    patch.setattr(module, name, replacement)
        yield
