"""The cost of farcall.compat at import, and its changes to modules that are imported later."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from beginnings import Beginning, ends_with_module

from farcall.compat.imports import ImportHook

# Modules that no program asked for. torch.distributed.optim alone imports 600 modules.
LATER = (
    "torch.distributed.optim",
    "torch.distributed.nn",
    "torch.distributed.rpc._testing",
    "torch.distributed.rpc.rref_proxy",
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "farcall.optim",
    "farcall.testing",
)

INSTALL = "import farcall.compat; farcall.compat.install()\n"

beginning = Beginning("""
import json, sys, torch
import farcall.rpc, farcall.autograd
""")
run = beginning.run
# All that takes long of torch.distributed.optim, but not that itself.
run_with_compiler = Beginning("import torch._dynamo", after=beginning).run
end = ends_with_module(beginning)


def test_standing_in_for_torch_costs_no_more_than_farcall() -> None:
    more = run(
        "by_itself = set(sys.modules)\n"
        + INSTALL
        + "print(json.dumps(list(set(sys.modules) - by_itself)))"
    )
    assert isinstance(more, list)
    assert "farcall.compat" in more
    assert {name for name in more if name.startswith(LATER)} == set()
    assert {name for name in more if not name.startswith("farcall.compat")} == set()


@pytest.mark.parametrize("when", ["before", "after"])
def test_optimizer_is_farcalls_whenever_its_module_is_imported(when: str) -> None:
    imported = "import torch.distributed.optim as optim\n"
    seen = run_with_compiler(
        (imported + INSTALL if when == "before" else INSTALL + imported)
        + """
import torch.distributed.autograd, torch.distributed.rpc
from farcall.optim import DistributedOptimizer
from torch.distributed.optim import optimizer
during = [
    optim.DistributedOptimizer is DistributedOptimizer,
    optimizer.DistributedOptimizer is DistributedOptimizer,
    optimizer.rpc is torch.distributed.rpc,
    optimizer.RRef is torch.distributed.rpc.RRef,
    optimizer.dist_autograd is torch.distributed.autograd,
]
farcall.compat.uninstall()
own = optimizer.DistributedOptimizer
print(json.dumps([during, [
    own is not DistributedOptimizer,
    own is optim.DistributedOptimizer,
    own.__module__,
    optimizer.rpc is torch.distributed.rpc,
    optimizer.RRef is torch.distributed.rpc.RRef,
    optimizer.dist_autograd is torch.distributed.autograd,
]]))
"""
    )
    assert seen == [
        [True] * 5,
        [True, True, "torch.distributed.optim.optimizer", True, True, True],
    ]


@pytest.mark.parametrize("name", ["nn.api.remote_module", "rpc.rref_proxy", "rpc._testing"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_module_sees_farcall_while_that_is_installed_and_else_torch(name: str, when: str) -> None:
    name = f"torch.distributed.{name}"
    seen = run(
        (f"import {name}\n" if when == "before" else "")
        + INSTALL
        + f"""
import importlib

def rpc_of(name):
    module = importlib.import_module(name)
    if hasattr(module, "rpc_async"):
        return module.rpc_async.__globals__["__name__"]
    one = getattr(module, "faulty_agent_backend_registry", module)
    return one.rpc.__name__

during = rpc_of("{name}")
farcall.compat.uninstall()
print(json.dumps([during, rpc_of("{name}")]))
"""
    )
    assert isinstance(seen, list)
    assert seen[0].startswith("farcall.compat.rpc")
    assert seen[1].startswith("torch.distributed.rpc")


def test_nothing_is_left_among_the_finders() -> None:
    assert run(
        "before = list(sys.meta_path)\n"
        + INSTALL
        + "during = len(sys.meta_path)\nfarcall.compat.uninstall()\n"
        + "print(json.dumps([during - len(before), sys.meta_path == before]))"
    ) == [1, True]


def test_reinstalling_replaces_modules_that_were_imported_in_between() -> None:
    assert run(
        INSTALL
        + """
import torch.distributed.nn.api.remote_module, torch.distributed.rpc._testing
farcall.compat.uninstall()
import torch.distributed.nn.api.remote_module as theirs
assert theirs.rpc.__name__ == "torch.distributed.rpc", theirs.rpc
farcall.compat.install()
import torch.distributed.nn.api.remote_module as ours
import torch.distributed.rpc as rpc, torch.distributed.rpc._testing
print(json.dumps([ours.rpc is rpc, "FAULTY_TENSORPIPE" in rpc.BackendType.__members__]))
"""
    ) == [True, True]


def test_a_module_that_fails_to_be_imported_fails_as_without() -> None:
    assert run_with_compiler(
        INSTALL
        + """
sys.modules["torch.distributed.optim.named_optimizer"] = None
try:
    import torch.distributed.optim
except ImportError:
    first = "torch.distributed.optim" in sys.modules
del sys.modules["torch.distributed.optim.named_optimizer"]
import torch.distributed.optim
print(json.dumps([first, torch.distributed.optim.DistributedOptimizer.__module__]))
"""
    ) == [False, "farcall.optim.handle"]


def test_a_remote_module_may_be_imported_when_rpc_runs_already() -> None:
    """Note its pickling in a table when it is imported; agents look there."""
    assert run(
        INSTALL
        + """
import torch.distributed as dist
import torch.distributed.rpc as rpc
rpc._init_rpc_backend(
    store=dist.HashStore(), name="alone", rank=0, world_size=1,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(),
)
rpc.rpc_sync("alone", len, ([object],))  # a pickler exists
from torch.distributed.nn import RemoteModule
module = RemoteModule("alone/cpu", torch.nn.Linear, (2, 3))
def shape(module): return list(module.forward(torch.ones(1, 2)).shape)
there = rpc.rpc_sync("alone", shape, (module,))
print(json.dumps(there))
del module
rpc.shutdown()
"""
    ) == [1, 3]


def test_functions_of_remote_modules_are_found_where_none_was_imported() -> None:
    assert (
        run(
            INSTALL
            + """
from farcall.serde.functions import resolve
print(json.dumps(resolve("_remote_module_non_scriptable:_remote_forward").__name__))
"""
        )
        == "_remote_forward"
    )


# torch's generator of that module before torch 2.13.
OLDER_TORCH = """
import importlib, pathlib, tempfile, types
folder = tempfile.TemporaryDirectory()
sys.path.append(folder.name)
def instantiate():
    path = pathlib.Path(folder.name, "_remote_module_non_scriptable.py")
    path.write_text("def _remote_forward(): pass\\ndef _create_module(): pass\\nby = 'torch'")
    importlib.invalidate_caches()
    return importlib.import_module("_remote_module_non_scriptable")
instantiator = types.ModuleType("torch.distributed.nn.jit.instantiator")
instantiator.instantiate_non_scriptable_remote_module_template = instantiate
sys.modules[instantiator.__name__] = instantiator
"""


@pytest.mark.parametrize("first", ["torch.distributed.nn", "_remote_module_non_scriptable"])
def test_remote_modules_can_be_imported_where_torch_imports_code_that_it_writes(first: str) -> None:
    assert run(
        INSTALL
        + OLDER_TORCH
        + f"""
import {first}
import torch.distributed.nn, _remote_module_non_scriptable
used = torch.distributed.nn.api.remote_module._NON_SCRIPTABLE_REMOTE_MODULE_MODULE
print(json.dumps([used is _remote_module_non_scriptable, used.by]))
"""
    ) == [True, "torch"]


def imported_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ImportHook, Path]:
    """Make a module that imports another, which a hook makes by importing the first."""
    (tmp_path / "farcall_test_writer.py").write_text("import farcall_test_written")
    (tmp_path / "farcall_test_written.py").write_text("by = 'its own finder'")
    monkeypatch.syspath_prepend(str(tmp_path))

    def make() -> ModuleType:
        importlib.import_module("farcall_test_writer")
        return sys.modules["farcall_test_written"]

    hook = ImportHook()
    hook.instead("farcall_test_written", make, until="farcall_test_writer")
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    return hook, tmp_path


@pytest.fixture
def no_test_modules() -> Iterator[None]:
    yield
    for name in ("farcall_test_writer", "farcall_test_written"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("no_test_modules")
@pytest.mark.parametrize("first", ["farcall_test_writer", "farcall_test_written"])
def test_the_hook_stands_aside_while_the_module_itself_is_made(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported_by_two(tmp_path, monkeypatch)
    importlib.import_module(first)
    assert importlib.import_module("farcall_test_written").by == "its own finder"


@pytest.mark.usefixtures("no_test_modules")
def test_the_hook_stands_aside_in_the_thread_alone_that_runs_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, folder = imported_by_two(tmp_path, monkeypatch)
    found: list[object] = []

    def look() -> None:
        found.append(hook.find_spec("farcall_test_written", None))

    monkeypatch.setattr(sys, "farcall_test_look", look, raising=False)
    (folder / "farcall_test_writer.py").write_text(
        """
import sys, threading
sys.farcall_test_look()
other = threading.Thread(target=sys.farcall_test_look)
other.start()
other.join()
"""
    )
    importlib.import_module("farcall_test_writer")
    look()
    assert [one is None for one in found] == [True, False, False]
