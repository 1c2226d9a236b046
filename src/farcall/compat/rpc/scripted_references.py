"""References in TorchScript code, where torch's own are objects of C++.

When compiled code runs, a value that it takes for an `RRef[T]` is a *box*: a tensor that
has the reference as an attribute. A tensor that came from Python is the same Python object wherever
it arrives in Python again, so boxes may travel through lists, tuples, loops and forks. References
are boxed and unboxed where Python calls compiled code, and where that calls Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from farcall import torch_internals as internals
from farcall.rref import RRef

_REFERENCE = "_farcall_reference"

# By the name of a compiled function that takes or gives references: the same, but it takes boxes.
_entries: dict[str, Any] = {}


def boxed(value: Any) -> Any:
    """Return a value for compiled code."""
    if isinstance(value, RRef):
        box = torch.empty(0)
        setattr(box, _REFERENCE, value)
        return box
    return _in_containers(boxed, value)


def unboxed(value: Any) -> Any:
    """Return a value that compiled code gave."""
    if type(value) is torch.Tensor:
        return getattr(value, _REFERENCE, value)
    return _in_containers(unboxed, value)


def _in_containers(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    return value


def has_references(kind: Any) -> bool:
    """Return whether a type of TorchScript's is, or contains, that of a reference."""
    return contains(kind, "RRefType")


def contains(kind: Any, name: str) -> bool:
    """Return whether a type is, or contains, one of that kind.

    Attributes of objects are another matter: these stay where they are.
    """
    own = kind.kind()
    if own in ("ClassType", "InterfaceType"):
        return False
    return own == name or any(contains(part, name) for part in kind.containedTypes())


def boxed_type(kind: Any) -> Any:
    """Return the type that values of this type have when they run, another inside futures."""
    if not has_references(kind):
        return kind
    match kind.kind():
        case "RRefType":
            return internals.TensorType.get()
        case "TupleType":
            return internals.TupleType([boxed_type(element) for element in kind.elements()])
        case "ListType":
            return internals.ListType(boxed_type(kind.getElementType()))
        case "DictType":
            return internals.DictType(kind.getKeyType(), boxed_type(kind.getValueType()))
        case "OptionalType":
            return internals.OptionalType(boxed_type(kind.getElementType()))
    return kind


def note_compiled(name: str, graph: Any) -> None:
    """Give a function that was compiled an entry for Python, if it takes or gives references."""
    values = [*graph.inputs(), *graph.outputs()]
    if not any(has_references(value.type()) for value in values):
        return
    copy = graph.copy()
    for value in copy.inputs():
        if has_references(value.type()):
            typed = copy.create("prim::unchecked_cast", [], 1)
            typed.output().setType(value.type())
            value.replaceAllUsesWith(typed.output())
            typed.addInput(value)
            copy.prependNode(typed)
            value.setType(boxed_type(value.type()))
    path, _, last = name.rpartition(".")
    _entries[name] = internals.create_function_from_graph(f"{path}.farcall_entry.{last}", copy)


_call_function: Any = internals.ScriptFunction.__call__
_call_method: Any = internals.ScriptMethod.__call__


def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function from Python, with references among its arguments or results."""
    entry = _entries.get(function.qualified_name) if _entries else None
    given = None if entry is None else _all_arguments(function.schema, args, kwargs)
    if given is None:
        return _call_function(function, *args, **kwargs)
    return unboxed(_call_function(entry, *boxed(given)))


def call_method(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled method from Python, with references among its arguments or results."""
    module = method.owner if _entries else None
    entry = None if module is None else _entries.get(f"{module.qualified_name}.{method.name}")
    given = None if entry is None else _all_arguments(method.schema, (module, *args), kwargs)
    if given is None:
        return _call_method(method, *args, **kwargs)
    return unboxed(_call_function(entry, *boxed(given)))


def _all_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return all arguments by position, with defaults, or None if they don't fit."""
    arguments = schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or set(given) != set(names) or set(names[: len(args)]) & set(kwargs):
        return None
    return [given[name] for name in names]
