"""Private names of torch are used by way of farcall.torch_internals alone, and are there."""

from __future__ import annotations

import ast
import functools
import re
import threading
from pathlib import Path

import pytest
import torch
from private_names import (
    HOME,
    OF_OTHERS,
    PACKAGE,
    ROOT,
    defined_in,
    names_of_instances,
    uses_in,
    uses_in_cpp,
)

import farcall.torch_internals
from farcall import torch_internals as internals
from farcall.compat.rpc import scripts
from farcall.runtime.threads.thread_state import Restorer, float_control
from farcall.torch_internals.table import NEWEST, OLDEST, TABLE

FILES = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
OTHER_MODULES = [path for path in FILES if HOME not in path.parents]

PLANTED = {
    "an attribute of a module": "import torch\ntorch._C._set_grad_enabled(True)",
    "a public name of a private module": "import torch\ntorch._C.Future()",
    "an import": "import torch._dynamo",
    "an import with another name": "import torch._dynamo as compiler",
    "an import inside a function": "def f():\n    import torch._inductor.config",
    "an import of names": "from torch._ops import OpOverload",
    "an import of a private name": "from torch.autograd import _profiler_enabled",
    "an import of a private name as another": "from torch.autograd import _profiler_enabled as on",
    "an import of a private module": "from torch.utils import _pytree",
    "an import for type checkers": "if TYPE_CHECKING:\n    from torch._C import Future",
    "importlib": "import importlib\nimportlib.import_module('torch._dynamo')",
    "importlib, relative": "import importlib\nimportlib.import_module('._C', 'torch')",
    "__import__": "__import__('torch._dynamo')",
    "sys.modules": "import sys\nsys.modules['torch._C']",
    "getattr": "import torch\ngetattr(torch.optim, '_multi_tensor')",
    "hasattr": "def f(tensor):\n    return hasattr(tensor, '_backward_hooks')",
    "setattr": "def f(options):\n    setattr(options, '_timeout', 1)",
    "delattr": "def f(module):\n    delattr(module, '_compiled_call_impl')",
    "vars": "import torch\nvars(torch)['_C']",
    "__dict__": "import torch\ntorch.__dict__['_C']",
    "attrgetter": "import operator\noperator.attrgetter('_C._autograd')",
    "methodcaller": "import operator\noperator.methodcaller('_sequence_nr')",
    "an alias of torch": "import torch as t\nt._utils",
    "an alias of a module": "from torch import distributed as d\nc = d.distributed_c10d\nc._world",
    "an alias by import": "import torch.distributed.distributed_c10d as c10d\nc10d._world",
    "an alias with a type": "import torch\nhooks: Any = torch.autograd\nhooks._functions",
    "an alias inside a function": "import torch\ndef f():\n    x = torch.jit\n    return x._state",
    "an alias of an alias": "import torch\na = torch\nb = a.jit\nb._state",
    "an alias by :=": "import torch\nif (x := torch.jit):\n    x._state",
    "aliases in a tuple": "import torch\na, b = torch.jit, torch.fx\na._state",
    "an alias under a condition": "import torch\nx = torch.jit if True else None\nx._state",
    "a cast": "import torch\nx = cast(Any, torch.jit)\nx._state",
    "a type": "import torch\ndef f(future: torch._C.Future[Any]) -> None: ...",
    "a type as a text": "def f(future: 'torch._C.Future[Any]') -> None: ...",
    "a table of patches": "PATCHES = (('_jit_script_compile', None),)",
    "a table of modules": "MODULES = {'torch.distributed.rpc._testing': None}",
    "a formatted text": "NAME = f'torch._C._{name}'",
    "a tensor": "def f(tensor):\n    return tensor._version",
    "a module": "def f(module):\n    return module._parameters",
    "a graph": "def f(graph):\n    graph._erase_node(1)",
    "a node": "def f(tensor):\n    return tensor.grad_fn._sequence_nr()",
    "an assignment to an attribute": "def f(options):\n    options._timeout = 1",
    "a deletion": "def f(module):\n    del module._hooks",
    "an attribute of a base class": "class M(Module):\n    def f(self):\n        self._modules",
    "an attribute that this module's class has, too": (
        "class A:\n    def __init__(self):\n        self._parameters = 1\n"
        "def f(module):\n    return module._parameters"
    ),
    "a default": "import torch\ndef f(future=torch._C.Future): ...",
    "a decorator": "import torch\n@torch._dynamo.disable\ndef f(): ...",
}
HARMLESS = {
    "dunder names": "import torch\ntorch.__version__\ntorch.Tensor.__dict__['shape']",
    "public names": "import torch\nfrom torch.autograd.graph import Node\ntorch.futures.Future()",
    "a docstring": "def f():\n    '''As torch._C._set_grad_enabled.'''",
    "names of one's own": "class A:\n    def __init__(self):\n        self._x = 1\n    y = '_x'",
    "farcall's modules": "import farcall._native\nNAME = 'farcall._native'",
    "named tuples": "def f(it):\n    return it._replace(x=1)",
    "a throw-away variable": "for _ in '_':\n    pass",
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def of_farcall() -> frozenset[str]:
    """Return the private names that farcall's modules define."""
    return frozenset[str]().union(*(defined_in(tree_of(path)) for path in FILES))


@pytest.mark.parametrize("path", OTHER_MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_used_in_one_place(path: Path) -> None:
    found = uses_in(tree_of(path), of_farcall())
    assert found == [], "take them from farcall.torch_internals; tests/private_names.py has others"


def test_no_cpp_source_uses_private_names_of_torch() -> None:
    sources = [*ROOT.glob("native/**/*.cpp"), *ROOT.glob("native/**/*.hpp")]
    found = {path.name: uses_in_cpp(path.read_text("utf-8")) for path in sources}
    assert sources
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize("way", PLANTED)
def test_a_use_is_found(way: str) -> None:
    assert uses_in(ast.parse(PLANTED[way]), of_farcall())


def test_a_use_in_cpp_is_found() -> None:
    assert uses_in_cpp('auto c = nb::module_::import_("torch._C");')
    assert uses_in_cpp('if (nb::hasattr(tensor, "_version")) {')
    assert not uses_in_cpp('find(cpu, "_ZN5torch8autograd11AnomalyMode8_enabledE");')


@pytest.mark.parametrize("way", HARMLESS)
def test_other_names_are_not_taken_for_such(way: str) -> None:
    assert uses_in(ast.parse(HARMLESS[way]), of_farcall()) == []


def test_names_of_others_are_not_torchs() -> None:
    assert OF_OTHERS & {entry.attribute for entry in TABLE.values()} == set()
    assert {"_version", "_backward_hooks", "_parameters", "_sequence_nr"} <= names_of_instances()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


@pytest.mark.parametrize("name", TABLE)
def test_each_name_is_there(name: str) -> None:
    """Look only in the versions that had it; the table says nothing of others."""
    entry = TABLE[name]
    if numbers(entry.first) <= numbers(torch.__version__) <= numbers(entry.last):
        assert internals.has(name)
        assert getattr(internals, name) is not None


# Functions of farcall.torch_internals that take a name as a text.
BY_TEXT = {"assign", "attribute_of", "has", "path_of", "place_of"}


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def test_each_name_is_used() -> None:
    used = set()
    for path in OTHER_MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "internals":
                used.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module == "farcall.torch_internals":
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Call) and _name_of(node.func) in BY_TEXT:
                used |= {one.value for one in node.args if isinstance(one, ast.Constant)}
            elif isinstance(node, ast.Constant) and str(node.value).startswith("jit_script"):
                used.add(node.value)  # in a table of compat
    assert TABLE.keys() - used == set()


def test_each_name_has_a_type() -> None:
    tree = tree_of(HOME / "__init__.py")
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = set()
    for node in block.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            typed.add(node.target.id)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            typed.add(node.targets[0].id)
        elif isinstance(node, ast.ImportFrom):
            typed |= {alias.asname for alias in node.names if alias.asname}
    assert typed - {"Hooks"} == TABLE.keys()


def test_each_entry_is_complete() -> None:
    for entry in TABLE.values():
        assert entry.purpose
        assert numbers(OLDEST) <= numbers(entry.first) <= numbers(entry.last) <= numbers(NEWEST)
        assert any(part.startswith("_") for part in re.split("[.:]", entry.path)), entry.path


def test_a_name_that_this_torch_lacks_fails_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fail late in a build of torch without gloo, nccl or RPC: importing farcall works."""
    lacking = TABLE["GlooOptions"]._replace(path="torch.distributed.ProcessGroupNone._Options")
    monkeypatch.setitem(TABLE, "lacking", lacking)
    assert not internals.has("lacking")
    with pytest.raises(
        AttributeError, match=r"has no torch\.distributed\.ProcessGroupNone\._Options"
    ):
        _ = internals.lacking  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        _ = internals.unknown  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_older", [False, True])
def test_a_context_is_handed_on_and_taken_back_also_by_older_torch(
    is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_older:
        lacking = TABLE["remove_obj_from_tls"]._replace(path="torch._C._remove_nothing")
        monkeypatch.setitem(TABLE, "remove_obj_from_tls", lacking)
        monkeypatch.delitem(vars(internals), "remove_obj_from_tls", raising=False)
    context = object()
    monkeypatch.setattr(scripts, "current_context", lambda: context)
    with scripts._handing_on():
        with scripts._handing_on():
            assert scripts.handed_on() is context
        assert scripts.handed_on() is context
    assert scripts.handed_on() is None


def test_a_default_device_that_was_put_back_is_no_context_for_older_torch() -> None:
    """`torch.get_default_device` of torch 2.9 fails where the context is there, and is None."""
    found: list[object] = []

    def set_and_put_back() -> None:
        restorer = Restorer(float_control())
        torch.set_default_device("meta")
        restorer.put_back()
        found.append(hasattr(internals.global_device_context, "device_context"))
        found.append(torch.get_default_device())

    thread = threading.Thread(target=set_and_put_back)
    thread.start()
    thread.join()
    assert found == [False, torch.device("cpu")]


def test_a_variable_that_changes_is_read_anew() -> None:
    assert not internals.is_profiler_enabled()
    with torch.profiler.profile():
        assert internals.is_profiler_enabled()
    assert not internals.is_profiler_enabled()


def test_an_attribute_of_an_instance_is_set_by_its_own_name() -> None:
    options = internals.GlooOptions()
    internals.assign(options, "threads_of_options", 3)
    assert options._threads == internals.threads_of_options(options) == 3


def test_a_name_is_looked_up_once() -> None:
    vars(farcall.torch_internals).pop("set_grad_enabled", None)
    assert internals.set_grad_enabled is vars(farcall.torch_internals)["set_grad_enabled"]
    assert internals.set_grad_enabled is torch._C._set_grad_enabled
