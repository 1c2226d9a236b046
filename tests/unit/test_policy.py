"""Policies: functions and methods by exact names, and nothing that a name merely leads to."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farcall.errors import Refused
from farcall.runtime.calls.policy import Policy, check, method_of
from farcall.serde import Only

HERE = __name__


def elsewhere(*args: object) -> str:
    return "elsewhere"


class Base:
    def inherited(self) -> str:
        return "inherited"


class Model(Base):
    system = staticmethod(os.system)
    getpid = os.getpid
    borrowed = elsewhere
    partial = functools.partial(elsewhere)
    nested = Base

    def __init__(self) -> None:
        self.run_me = os.getcwd
        self.forward = elsewhere  # type: ignore[method-assign, assignment]  # hides the method

    def forward(self, x: int = 0) -> int:
        return x + 1

    def _private(self) -> str:
        return "private"

    public_alias = _private

    def visible(self) -> str:
        return "visible"

    _hidden_alias = visible

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def static() -> str:
        return "static"

    @property
    def prop(self) -> Callable[[], str]:
        return os.getcwd

    def __getattr__(self, name: str) -> Callable[[], str]:
        return os.getcwd


class Child(Model):
    def forward(self, x: int = 0) -> int:
        return x + 2


def run(names: list[Any] | None, value: object, name: str, *args: Any) -> Any:
    return method_of(None if names is None else Only(names), value, name)(*args)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        *(("forward", 1), ("visible", "visible"), ("of_class", "Model"), ("static", "static")),
        ("_private", "private"),
    ],
)
def test_a_listed_method_that_the_class_defines_may_be_called(name: str, result: object) -> None:
    assert run([f"{HERE}:Model.{name}"], Model(), name) == result


def test_methods_may_be_listed_as_functions() -> None:
    assert run([Model.forward], Model(), "forward") == 1
    assert run([Model.of_class], Model(), "of_class") == "Model"
    assert run([Base.inherited], Model(), "inherited") == "inherited"
    assert run([Model.inherited], Model(), "inherited") == "inherited"


@pytest.mark.parametrize(
    "name",
    [
        *("system", "getpid", "borrowed", "partial", "nested"),  # another's, by the class
        *("run_me", "anything", "prop"),  # an attribute, `__getattr__`, a property
        *("inherited", "public_alias", "_hidden_alias"),
        *(n for n in dir(object) if callable(getattr(object, n)) and n not in vars(Model)),
        *("__dict__", "mro", "__subclasses__"),
    ],
)
def test_an_attribute_that_the_class_does_not_define_as_a_method_may_not_be_called(
    name: str,
) -> None:
    for names in ([f"{HERE}:Model.{name}"], [Model.forward, f"{HERE}:Model"], []):
        with pytest.raises(Refused, match="does not allow calls of"):
            run(names, Model(), name)


def test_the_class_that_defines_the_method_counts_and_not_that_of_the_value() -> None:
    assert run([f"{HERE}:Base.inherited"], Model(), "inherited") == "inherited"
    assert run([f"{HERE}:Model.visible"], Child(), "visible") == "visible"
    with pytest.raises(Refused, match=r"Child\.forward"):
        run([f"{HERE}:Model.forward"], Child(), "forward")
    with pytest.raises(Refused, match=r"Child\.visible', which is .*Model\.visible"):
        run([f"{HERE}:Child.visible"], Child(), "visible")


def test_a_second_name_of_a_function_has_to_be_listed_as_well() -> None:
    both = [f"{HERE}:Model._private", f"{HERE}:Model.public_alias"]
    assert run(both, Model(), "public_alias") == "private"
    for one in both:
        with pytest.raises(Refused):
            run([one], Model(), "public_alias")


def test_methods_of_compiled_classes_go_by_their_own_names() -> None:
    values: list[int] = []
    run(["builtins:list.append"], values, "append", 1)
    run([list.append], values, "append", 2)
    assert values == [1, 2]
    with pytest.raises(Refused):
        run(["builtins:list.append"], values, "clear")
    x = torch.zeros(1)
    run([torch.Tensor.add_], x, "add_", 1)
    run(["torch:Tensor.add_"], x, "add_", 1)
    assert x.item() == 2
    with pytest.raises(Refused):
        run([torch.Tensor.add_], x, "zero_")
    module = torch.nn.Linear(1, 1)
    assert run([torch.nn.Linear.forward], module, "forward", torch.ones(1)).shape == (1,)
    with pytest.raises(Refused):
        run([torch.nn.Linear.forward], module, "apply", print)


class Watched(type):
    """A metaclass that runs no code: it would be the code of the sender of the value's class."""

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


class Guarded(metaclass=Watched):
    def method(self) -> int:
        return 1

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_looking_a_method_up_runs_no_code_of_the_value() -> None:
    with pytest.raises(Refused, match=r"Guarded\.other"):
        run([], Guarded(), "other")


@pytest.mark.parametrize("value", [os, Model, elsewhere, functools.partial(elsewhere)])
def test_values_that_are_modules_classes_or_functions_offer_nothing(value: object) -> None:
    for name in ("system", "visible", "__call__", "func"):
        with pytest.raises(Refused):
            run([f"{HERE}:Model.visible", os.system, print], value, name)


def test_without_a_policy_everything_may_be_called() -> None:
    assert run(None, Model(), "anything") == os.getcwd()
    assert run(None, Model(), "forward") == "elsewhere"


@pytest.mark.parametrize(
    ("functions", "error"),
    [
        ("app:f", TypeError),
        (elsewhere, TypeError),
        ([5], TypeError),
        ([None], TypeError),
        *(([name], ValueError) for name in ("app", "app:", ":f", "app:*", "*", "a b:c", "app:f.*")),
        (["torch.*:*"], ValueError),
        ([lambda: 1], ValueError),
        ([functools.partial(elsewhere)], ValueError),
    ],
)
def test_a_value_that_is_no_list_of_functions_is_refused(
    functions: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Only(functions)


@pytest.mark.parametrize("types", [Model, "app:Model", ["app:Model"], [5], [Model()]])
def test_a_value_that_is_no_list_of_classes_is_refused(types: Any) -> None:
    with pytest.raises(TypeError):
        Only(types=types)


def test_a_policy_shows_its_functions_and_types() -> None:
    only = Only([elsewhere, "app:f"], [Model], max_objects=5)
    assert repr(only) == (
        f"Only(functions=['app:f', '{HERE}:elsewhere'], types=['{HERE}:Model'], max_objects=5)"
    )


def test_no_module_is_imported_for_a_name_that_is_not_allowed() -> None:
    for name in ("this:s", "antigravity:webbrowser", "posix:system", ""):
        with pytest.raises(Refused):
            check(Only([elsewhere]), name)
        with pytest.raises(Refused):
            Only([elsewhere]).find(name)
    assert not {"this", "antigravity"} & sys.modules.keys()


@pytest.mark.parametrize("name", ["os:system", "torch.utils.collect_env:os.system"])
def test_a_listed_name_that_leads_to_an_object_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="not defined there"):
        Only([name]).find(name)


def test_callers_have_rules_of_their_own() -> None:
    first, second = Only(["app:f"]), Only(["app:g"])
    policy = Policy({"trainer*": first, "*2": second})
    assert policy.of("trainer1") is policy.of("trainer2") is first
    assert policy.of("ps2") is second
    nothing = policy.of("ps3")
    assert nothing is not None
    assert not nothing.allows("app:f")
    assert Policy().of("anybody") is None
    assert Policy(first).of("anybody") is first
    assert Policy({}).is_strict
    assert Policy({}).of("anybody") is not None


class Caller:
    """An instance of it can be called."""

    def __call__(self, *args: object) -> str:
        return "called"


class AllKinds:
    """A class with an attribute of every kind that can be called or gives what can be."""

    builtin = os.getcwd
    builtin_type = len
    partial = functools.partial(elsewhere)
    partial_method = functools.partialmethod(elsewhere)
    of_instance = Caller()
    nested = Base
    nested_builtin = dict
    module = torch.nn.Identity()
    slot_wrapper = list.__len__
    object_slot = object.__repr__
    method_descriptor = list.append
    class_descriptor = dict.fromkeys
    borrowed = elsewhere
    lambda_ = lambda self: "lambda"  # noqa: E731
    wrapped = functools.wraps(elsewhere)(lambda self: "wrapped")
    cached = functools.lru_cache(elsewhere)
    single = functools.singledispatchmethod(elsewhere)
    getter = operator.attrgetter("__class__")
    static = staticmethod(elsewhere)
    static_builtin = staticmethod(os.getcwd)
    static_partial = staticmethod(functools.partial(elsewhere))
    of_class = classmethod(elsewhere)
    prop = property(lambda self: os.getcwd)
    bound = Base().inherited

    @functools.cached_property
    def cached_prop(self) -> Any:
        return os.getcwd

    def method(self) -> str:
        return "method"


KINDS = sorted(name for name in vars(AllKinds) if not name.startswith("__"))
# An object that may be another's function, whatever its name, is never called.
NEVER = {
    *("partial", "partial_method", "static_partial", "of_instance", "nested", "nested_builtin"),
    *("module", "cached", "single", "getter", "prop", "cached_prop", "bound"),
}


def outcome(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except (AttributeError, TypeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", KINDS)
def test_an_attribute_of_any_kind_is_refused_or_is_the_one_that_python_finds(name: str) -> None:
    value, only = AllKinds(), Only([f"{HERE}:AllKinds.{name}", elsewhere, os.getcwd, len])
    if name in NEVER:
        with pytest.raises(Refused, match=f"AllKinds.{name}"):
            method_of(only, value, name)
        return
    with contextlib.suppress(Refused):
        found = outcome(lambda: method_of(only, value, name))
        assert found == outcome(lambda: getattr(value, name))


def test_a_builtin_in_a_class_may_be_called_where_both_names_are_listed() -> None:
    assert run([os.getcwd, f"{HERE}:AllKinds.builtin"], AllKinds(), "builtin") == os.getcwd()
    with pytest.raises(Refused, match="builtin', which is "):
        run([f"{HERE}:AllKinds.builtin"], AllKinds(), "builtin")
