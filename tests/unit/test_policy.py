"""`allow_functions` on methods: only what a class defines, and only what the patterns name."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farcall.errors import Refused
from farcall.runtime.calls.policy import Policy

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


def run(patterns: list[str] | None, value: object, name: str, *args: Any) -> Any:
    return Policy(patterns).method_of(value, name)(*args)


@pytest.mark.parametrize(
    ("name", "result"),
    [("forward", 1), ("visible", "visible"), ("of_class", "Model"), ("static", "static")],
)
def test_what_the_class_defines_may_be_called(name: str, result: object) -> None:
    assert run([f"{HERE}:Model.*"], Model(), name) == result


@pytest.mark.parametrize(
    "name",
    [
        *("system", "getpid", "borrowed", "partial", "nested"),  # another's, by the class
        *("run_me", "anything", "prop"),  # an attribute, `__getattr__`, a property
        *("inherited", "_private", "public_alias", "_hidden_alias"),
        *(name for name in dir(object) if callable(getattr(object, name))),
        *("__dict__", "__getattr__", "mro", "__subclasses__", ""),
    ],
)
def test_nothing_else_may_be(name: str) -> None:
    for patterns in ([f"{HERE}:Model.*"], [f"{HERE}:Mod*"], [f"{HERE}:Model*"]):
        with pytest.raises(Refused, match="does not allow calls of"):
            run(patterns, Model(), name)


def test_the_class_that_defines_the_method_counts_and_not_that_of_the_value() -> None:
    assert run([f"{HERE}:Base.*"], Model(), "inherited") == "inherited"
    assert run([f"{HERE}:Model.*"], Child(), "visible") == "visible"
    with pytest.raises(Refused, match=r"Child\.forward"):
        run([f"{HERE}:Model.*"], Child(), "forward")
    with pytest.raises(Refused, match=r"Child\.visible', which is .*Model\.visible"):
        run([f"{HERE}:Child.*"], Child(), "visible")


def test_a_private_name_has_to_be_spelled_out() -> None:
    assert run([f"{HERE}:Model._private"], Model(), "_private") == "private"
    assert run(["*._private"], Model(), "_private") == "private"
    for pattern in ("*", f"{HERE}:Model._*", f"{HERE}:Model.?private", f"{HERE}:Model._privat[e]"):
        with pytest.raises(Refused):
            run([pattern], Model(), "_private")
    with pytest.raises(Refused):  # of a function, too, that is a method
        Policy(["*"]).check(f"{HERE}:Model._private")
    Policy(["*"]).check(f"{HERE}:_helper")


def test_a_second_name_of_a_function_has_to_match_as_well() -> None:
    both = [f"{HERE}:Model._private", f"{HERE}:Model.public_alias"]
    assert run(both, Model(), "public_alias") == "private"
    for one in both:
        with pytest.raises(Refused):
            run([one], Model(), "public_alias")


def test_methods_of_compiled_classes_go_by_their_own_names() -> None:
    values: list[int] = []
    run(["builtins:list.append"], values, "append", 1)
    assert values == [1]
    with pytest.raises(Refused):
        run(["builtins:list.append"], values, "clear")
    module = torch.nn.Linear(1, 1)
    assert run(["torch.nn.modules.linear:Linear.*"], module, "forward", torch.ones(1)).shape == (1,)
    with pytest.raises(Refused):
        run(["torch.nn.modules.linear:Linear.*"], module, "apply", print)


@pytest.mark.parametrize("value", [os, Model, elsewhere, functools.partial(elsewhere)])
def test_values_that_are_modules_classes_or_functions_offer_nothing(value: object) -> None:
    for name in ("system", "visible", "__call__", "func"):
        with pytest.raises(Refused):
            run(["*"], value, name)


def test_without_patterns_everything_may_be_called() -> None:
    assert run(None, Model(), "anything") == os.getcwd()
    assert run(None, Model(), "forward") == "elsewhere"


def test_text_in_the_place_of_patterns_is_refused() -> None:
    with pytest.raises(TypeError, match="several strings"):
        Policy("app:*")


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
PATTERNS = [["*"], [f"{HERE}:*"], [f"{HERE}:AllKinds.*"], ["*:*"], ["nothing:*"], []]


# What may be another's function, whatever its name, is never called.
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
@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
def test_an_attribute_of_any_kind_is_refused_or_is_what_python_finds(
    patterns: list[str], name: str
) -> None:
    value, policy = AllKinds(), Policy(patterns)
    if name in NEVER or not patterns or patterns[0] == "nothing:*":
        with pytest.raises(Refused, match=f"AllKinds.{name}"):
            policy.method_of(value, name)
        return
    with contextlib.suppress(Refused):
        found = outcome(lambda: policy.method_of(value, name))
        assert found == outcome(lambda: getattr(value, name))


def test_a_builtin_in_a_class_may_be_called_where_everything_is_allowed() -> None:
    assert run(["*"], AllKinds(), "builtin") == os.getcwd()
    assert run(["*"], AllKinds(), "builtin_type", "abc") == 3
    with pytest.raises(Refused, match="builtin', which is "):
        run([f"{HERE}:AllKinds.*"], AllKinds(), "builtin")
