"""Functions by name: what has one, what has none, and that both ways agree."""

from __future__ import annotations

import functools
import operator
import sys
import types

import numpy as np
import pytest
import torch

from farcall.errors import FunctionNotFound
from farcall.serde import Functions, name_of, resolve


def plain(value: int) -> int:
    return value + 1


class Outer:
    class Inner:
        def method(self) -> str:
            return "inner"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    def method(self) -> str:
        return "method"


class Sub(Outer):
    pass


class CallableObject:
    def __call__(self) -> None: ...


class Hostile:
    def __getattr__(self, name: str) -> object:
        raise ValueError(name)

    def __call__(self) -> None: ...


@functools.wraps(plain)
def liar(value: int) -> int:
    return -value


@functools.wraps(plain)
def replaced(value: int) -> int:
    return -value


anonymous = lambda: None  # noqa: E731


@torch.jit.script
def scripted(value: torch.Tensor) -> torch.Tensor:
    return value + 1


NAMED = [
    (plain, f"{__name__}:plain"),
    (Outer, f"{__name__}:Outer"),
    (Outer.Inner.method, f"{__name__}:Outer.Inner.method"),
    (Outer.static, f"{__name__}:Outer.static"),
    (Outer.made, f"{__name__}:Outer.made"),
    (Sub.made, f"{__name__}:Sub.made"),
    (Outer.method, f"{__name__}:Outer.method"),
    (Sub.method, f"{__name__}:Outer.method"),
    (scripted, f"{__name__}:scripted"),
    (torch.add, "torch:add"),
    (torch.tensor, "torch:tensor"),
    (torch.Tensor.add, "torch:Tensor.add"),
    (torch.Tensor.backward, "torch._tensor:Tensor.backward"),
    (torch.nn.functional.relu, "torch.nn.functional:relu"),
    (torch.nn.functional.linear, "torch._C._nn:linear"),
    (torch.nn.functional.max_pool2d, "torch.nn.functional:max_pool2d"),
    (torch.nn.Linear, "torch.nn.modules.linear:Linear"),
    (torch.ops.aten.add, "torch:ops.aten.add"),
    (torch.ops.aten.add.Tensor, "torch:ops.aten.add.Tensor"),
    (operator.add, "_operator:add"),
    (len, "builtins:len"),
    (dict.fromkeys, "builtins:dict.fromkeys"),
    (dict.get, "builtins:dict.get"),
    (np.add, "numpy:add"),
]


@pytest.mark.parametrize(("function", "name"), NAMED, ids=[name for _, name in NAMED])
def test_name_leads_back_to_the_function(function: object, name: str) -> None:
    assert name_of(function) == name
    assert resolve(name) == function
    assert Functions().resolve(name) == function


def local() -> object:
    def inner() -> None: ...

    return inner


NAMELESS = {
    "lambda": anonymous,
    "local function": local(),
    "partial": functools.partial(plain, 1),
    "bound method": Outer().method,
    "callable object": CallableObject(),
    "module": torch.nn.Linear(1, 1),
    "bound builtin": [].append,
    "wraps another": liar,
    "object that raises": Hostile(),
    "not a function": 3,
}


@pytest.mark.parametrize("function", NAMELESS.values(), ids=NAMELESS)
def test_an_object_without_a_true_name_gets_none(function: object) -> None:
    assert name_of(function) is None


def test_spawned_main_is_named_main(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("__mp_main__")
    exec("def work(): return 7", module.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert module.work.__module__ == "__mp_main__"
    assert name_of(module.work) == "__main__:work"
    assert resolve("__main__:work")() == 7
    assert resolve("__mp_main__:work")() == 7


def make_scripted(factor: int) -> object:
    def mangled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    mangled.__qualname__ = "mangled"
    return torch.jit.script(mangled)


def test_script_function_that_torch_renamed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make_scripted(1)
    function = make_scripted(2)
    assert "___torch_mangle" in function.qualified_name
    assert name_of(function) is None
    monkeypatch.setattr(sys.modules[__name__], "mangled", function, raising=False)
    assert name_of(function) == f"{__name__}:mangled"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("no_such_package.module:fn", "no module named 'no_such_package'"),
        (f"{__name__}:nothing", f"module {__name__!r} has no attribute 'nothing'"),
        (f"{__name__}:Outer.nothing", "'Outer' has no attribute 'nothing'"),
    ],
)
def test_missing_function_is_told_by_its_missing_part(name: str, missing: str) -> None:
    with pytest.raises(FunctionNotFound, match="importable on the callee too") as caught:
        resolve(name)
    assert missing in str(caught.value)


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_a_function_that_the_script_lacks_here_may_stand_behind_its_last_line(module: str) -> None:
    with pytest.raises(FunctionNotFound, match='above `if __name__ == "__main__":`'):
        resolve(f"{module}:defined_in_the_driver_only")


@pytest.mark.parametrize("name", ["", "nocolon", ":x", "x:", "torch:float32", "sys:path"])
def test_a_text_that_is_not_a_callable_name_is_refused(name: str) -> None:
    with pytest.raises(FunctionNotFound):
        resolve(name)


def test_module_that_fails_to_import_is_function_not_found(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_on_import.py").write_text("1 / 0")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FunctionNotFound, match="ZeroDivisionError") as caught:
        resolve("broken_on_import:fn")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_remembered_name_sees_the_function_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Functions()
    name = f"{__name__}:plain"
    assert functions.resolve(name) is plain
    monkeypatch.setattr(sys.modules[__name__], "plain", replaced)
    assert functions.resolve(name) is replaced
