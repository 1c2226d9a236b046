"""A plugin for mypy: what a `farcall.Handle` has, by the class of the object that it leads to.

    [tool.mypy]
    plugins = ["farcall.mypy_plugin"]

It runs inside of mypy alone, and farcall imports it nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mypy.checker import TypeChecker
from mypy.nodes import ArgKind, Context, Expression
from mypy.plugin import AttributeContext, FunctionContext, MethodContext, Plugin
from mypy.types import CallableType, Instance, Parameters, ProperType, Type, get_proper_type

_SPAWN = "farcall.actors.handles.spawn"
_HANDLE = "farcall.actors.handles.Handle."
_FUTURES = {"torch.futures.Future", "farcall.runtime.calls.future.Future"}
_USES = {f"__{use}__" for use in ("contains", "delitem", "getitem", "iter", "len", "setitem")}


class HandlePlugin(Plugin):
    """Gives the members of handles, and what statements do with them, their types."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        name = fullname.removeprefix(_HANDLE)
        return None if name == fullname else partial(_member, name)

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        name = fullname.removeprefix(_HANDLE)
        return partial(_use, name) if name in _USES else None

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        return _spawn if fullname == _SPAWN else None


def _member(name: str, context: AttributeContext) -> Type:
    """Return the type of `handle.name`."""
    member = get_proper_type(context.default_attr_type)
    found = _of_object(name, context.type, context.context, context.api)
    if found is None or not isinstance(member, Instance):
        return member
    parameters, result = member.args[0], found
    if isinstance(found, CallableType) and not found.is_type_obj():
        if found.variables:
            return member  # a generic function: its types would lead out of it
        parameters = Parameters(found.arg_types, found.arg_kinds, found.arg_names)
        result = get_proper_type(found.ret_type)
        if isinstance(result, Instance) and result.type.fullname in _FUTURES:
            result = get_proper_type(result.args[0])  # as `async_execution` does
    elif not isinstance(found, Instance) or found.type.get("__call__"):
        return member  # overloads, for example
    return member.copy_modified(args=[parameters, result])


def _use(name: str, context: MethodContext) -> Type:
    """Return the type of `handle[key]` and the like, once the arguments are checked."""
    method = _of_object(name, context.type, context.context, context.api)
    if method is None:
        return context.default_return_type
    return _checked_call(method, context, range(len(context.args)))


def _spawn(context: FunctionContext) -> Type:
    """Return the type of what `spawn` returns, once the arguments of the class are checked."""
    formals = context.callee_arg_names
    if "name" in formals:  # else its `ParamSpec` has checked them
        (cls,) = context.arg_types[1]
        _checked_call(cls, context, (formals.index("args"), formals.index("kwargs")))
    return context.default_return_type


def _of_object(name: str, handle: Type, context: Context, api: object) -> ProperType | None:
    """Return the type of a member of a handle's object. Reports it if there is none."""
    assert isinstance(api, TypeChecker)
    if not isinstance(handle, Instance) or len(handle.args) != 1:
        return None
    kind = get_proper_type(handle.args[0])
    if not isinstance(kind, Instance):
        return None
    checker = api.expr_checker
    return get_proper_type(checker.analyze_external_member_access(name, kind, context))


def _checked_call(
    callee: Type, context: FunctionContext | MethodContext, formals: range | tuple[int, ...]
) -> Type:
    """Return the type of what a call returns. Reports arguments that do not fit."""
    assert isinstance(context.api, TypeChecker)
    args: list[Expression] = []
    kinds: list[ArgKind] = []
    names: list[str | None] = []
    for formal in formals:
        args += context.args[formal]
        kinds += context.arg_kinds[formal]
        names += context.arg_names[formal]
    result, _ = context.api.expr_checker.check_call(callee, args, kinds, context.context, names)
    return result


def plugin(version: str) -> type[Plugin]:
    """Return the entry that mypy looks for."""
    return HandlePlugin
