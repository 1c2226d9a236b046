"""Changes of torch by farcall.compat, and by nothing else of farcall."""

from __future__ import annotations

import pytest
from beginnings import Beginning, ends_with_module
from patience import PATIENCE

SNAPSHOT = """
import json, sys
import torch
import torch.distributed.nn.api.remote_module, torch.distributed.optim.optimizer
import torch.distributed.rpc._testing, torch.nn.parallel.distributed
import torch.distributed.rpc.rref_proxy

NAMES = [name for name in sys.modules if name.startswith((
    "torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim",
    "torch.distributed.nn", "torch._C._distributed_rpc", "torch._C._distributed_autograd",
)) or name in (
    "torch", "torch.distributed", "torch._C", "torch._jit_internal", "torch.jit._recursive",
    "torch.nn.parallel.distributed",
)]
CLASSES = (torch._C.ScriptFunction, torch._C.ScriptMethod, torch._C.ScriptModule)

def snapshot():
    places = {name: (id(sys.modules.get(name)), vars(sys.modules[name])) for name in NAMES}
    places |= {kind.__name__: (id(kind), vars(kind)) for kind in CLASSES}
    places["built-in functions"] = (0, torch.jit._builtins._get_builtin_table())
    return {
        name: (place, {key: id(value) for key, value in inside.items()})
        for name, (place, inside) in places.items()
    }

def changes(before):
    after = snapshot()
    return sorted(
        {f"{name}" for name in before if before[name][0] != after[name][0]}
        | {
            f"{name}.{key}"
            for name in before
            for key in before[name][1].keys() | after[name][1].keys()
            if before[name][0] == after[name][0]
            and before[name][1].get(key) != after[name][1].get(key)
        }
    )
"""

beginning = Beginning(SNAPSHOT)
run = Beginning("import farcall.compat", after=beginning).run
end = ends_with_module(beginning)


def test_importing_farcall_changes_nothing_in_torch() -> None:
    changed = beginning.run("""
before = snapshot()
import farcall, farcall.rpc, farcall.autograd, farcall.optim, farcall.nn, farcall.functions
imported = changes(before)
import farcall.compat
print(json.dumps([imported, changes(before)]))
""")
    assert changed == [[], []]


def test_uninstall_puts_everything_back() -> None:
    changed = run("""
import farcall.compat
before = snapshot()
farcall.compat.install()
farcall.compat.install()
installed = changes(before)
farcall.compat.uninstall()
once = changes(before)
farcall.compat.install()
again = changes(before)
farcall.compat.uninstall()
print(json.dumps([len(installed) > 10, once, again == installed, changes(before)]))
""")
    assert changed == [True, [], True, []]


MODULES = (
    "torch.distributed.rpc",
    "torch.distributed.rpc.api",
    "torch.distributed.rpc.functions",
    "torch.distributed.rpc.internal",
    "torch.distributed.rpc.options",
    "torch.distributed.rpc.constants",
    "torch.distributed.rpc.backend_registry",
    "torch.distributed.rpc._testing",
    "torch.distributed.rpc.rref_proxy",
    "torch.distributed.autograd",
    "torch.distributed.nn.api.remote_module",
)


def test_each_module_is_farcalls_however_it_is_imported() -> None:
    imports = "".join(
        f"""
import {name}
from {name.rpartition(".")[0]} import {name.rpartition(".")[2]} as one
other = importlib.import_module("{name}")
seen["{name}"] = [one is other, one is {name}, one is not theirs["{name}"]]
"""
        for name in MODULES
    )
    seen = run(f"""
import importlib
import farcall.compat
theirs = {{name: sys.modules[name] for name in {MODULES}}}
farcall.compat.install()
seen = {{}}
{imports}
print(json.dumps(seen))
""")
    assert seen == dict.fromkeys(MODULES, [True] * 3)


def test_names_that_torch_took_at_import() -> None:
    seen = run("""
import farcall.compat
from farcall.rref import RRef
from farcall.optim import DistributedOptimizer
farcall.compat.install()
from torch.distributed.optim.optimizer import DistributedOptimizer as theirs
print(json.dumps([
    torch._jit_internal.RRef is RRef,
    torch._jit_internal.PyRRef is RRef,
    torch.nn.parallel.distributed.RRef is RRef,
    torch._C._distributed_rpc.PyRRef is RRef,
    torch._C._distributed_rpc._is_current_rpc_agent_set() is False,
    theirs is DistributedOptimizer,
    torch.distributed.optim.DistributedOptimizer is DistributedOptimizer,
    torch.distributed.nn.RemoteModule is torch.distributed.nn.api.remote_module.RemoteModule,
]))
""")
    assert seen == [True] * 8


def test_private_names_that_programs_use() -> None:
    missing = run("""
import farcall.compat
farcall.compat.install()
import torch.distributed.rpc as rpc
import torch.distributed.autograd as dist_autograd
NAMES = '''api._all_gather api._barrier api._require_initialized api._wait_all AllGatherStates
_get_current_rpc_agent _is_current_rpc_agent_set PyRRef api._use_rpc_pickler _set_rpc_timeout
_rref_context_get_debug_info backend_registry.register_backend constants.DEFAULT_RPC_TIMEOUT_SEC
internal._internal_rpc_pickler functions.async_execution options.TensorPipeRpcBackendOptions'''
def has(name):
    found = rpc
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None
missing = [name for name in NAMES.split() if not has(name)]
options = rpc.TensorPipeRpcBackendOptions(_transports=["shm", "uv"], _channels=["basic"])
print(json.dumps([missing, hasattr(dist_autograd, "DistAutogradContext")]))
""")
    assert missing == [[], True]


def test_workers_meet_at_the_store_that_the_starter_of_backends_is_given() -> None:
    seen = run("""
import farcall.compat
farcall.compat.install()
import torch.distributed as dist
import torch.distributed.rpc as rpc
store = dist.HashStore()
rpc._init_rpc_backend(
    store=store, name="alone", rank=0, world_size=1,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method="file:///no/such/folder/file"),
)
print(json.dumps([rpc.get_worker_info().name, store.num_keys() > 0]))
rpc.shutdown()
""")
    assert seen == ["alone", True]


def test_a_function_in_the_place_of_wait_all_workers_is_called() -> None:
    seen = run("""
import farcall.compat
farcall.compat.install()
import torch.distributed as dist
import torch.distributed.rpc as rpc

def start():
    rpc._init_rpc_backend(
        store=dist.HashStore(), name="alone", rank=0, world_size=1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(),
    )

waited = []
rpc.api._wait_all_workers = waited.append
start()
rpc.shutdown(timeout=5)

def fail(timeout):
    raise RuntimeError("not all have come")

rpc.api._wait_all_workers = fail
start()
try:
    rpc.shutdown()
except RuntimeError as error:
    waited.append(str(error))
print(json.dumps([waited, rpc.api._is_current_rpc_agent_set()]))
""")
    assert seen == [[5, "not all have come"], False]


@pytest.mark.parametrize("wait", ["wait_all", "collect_all"])
def test_ctrl_c_ends_the_waits_for_several_futures(wait: str) -> None:
    """Replace torch's own waits, which natively notice signals at their end only."""
    said = run(f"""
import os, signal, threading
import farcall.compat
farcall.compat.install()
import torch.distributed as dist
import torch.distributed.rpc as rpc
rpc._init_rpc_backend(
    store=dist.HashStore(), name="alone", rank=0, world_size=1,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(),
)
go_on, is_in_try = threading.Event(), threading.Event()

def hold():
    is_in_try.wait()
    os.kill(os.getpid(), signal.SIGINT)
    return go_on.wait({PATIENCE})

said = []
futures = [rpc.rpc_async("alone", hold, timeout=0)]
try:
    is_in_try.set()
    if "{wait}" == "wait_all":
        torch.futures.wait_all(futures)
    else:
        torch.futures.collect_all(futures).wait()
except KeyboardInterrupt:
    said.append("interrupted")
go_on.set()
said.append(torch.futures.wait_all(futures))
rpc.shutdown()
print(json.dumps(said))
""")
    assert said == ["interrupted", [True]]
