"""Objects taken apart and put together, without calling any code that their classes define."""

from __future__ import annotations

import builtins
import copyreg
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch

from farcall import errors
from farcall.errors import Refused, SerializationError
from farcall.ids import WorkerInfo
from farcall.serde.exceptions import Stripped, parts_of, set_attribute
from farcall.serde.exceptions import bare as bare_exception
from farcall.serde.exceptions import initialize as initialize_exception
from farcall.serde.strict.fields import checked_parts, combination, unicode_error
from farcall.serde.strict.only import Only, name_of_class
from farcall.torch_internals import compiled_call_impl

_REDUCTIONS = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
# Descriptors of a class that are no code of its own, or whose values lie in the `__dict__`.
_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType, functools.cached_property)


class _Own(NamedTuple):
    """The way in which objects of a class of farcall's own travel."""

    take: Callable[[Any], Any]
    parts: type
    make: Callable[[Any], Any]


_OWN: dict[type, _Own] = {}
_OWN_BY_NAME: dict[str, _Own] = {}


def own_type(
    kind: type, take: Callable[[Any], Any], parts: type, make: Callable[[Any], Any]
) -> None:
    """Register a class of farcall's, objects of which every worker takes.

    The layers above register theirs while they are imported, and are named nowhere below.

    Args:
        kind: the class.
        take: returns what stands for an object in a message.
        parts: the exact type of that.
        make: makes it of that. A peer may send anything of that type.
    """
    _OWN[kind] = _OWN_BY_NAME[name_of_class(kind)] = _Own(take, parts, make)


def _worker_info(parts: Any) -> WorkerInfo:
    name, id = parts
    if type(name) is not str or type(id) is not int:
        raise ValueError("no name and id of a worker")
    return WorkerInfo(name, id)


own_type(WorkerInfo, lambda info: (info.name, info.id), tuple, _worker_info)

_EXCEPTIONS: dict[str, type[BaseException]] = {
    name_of_class(kind): kind
    for kind in [*vars(builtins).values(), *vars(errors).values()]
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


# Taking apart -----------------------------------------------------------------------------------


def parts_of_object(value: Any) -> tuple[str, Any]:
    """Return the name of an object's class, and what stands for the object.

    Raises:
        SerializationError: it is of a kind that does not travel to a worker with a policy.
    """
    kind = type(value)
    own = _OWN.get(kind)
    if own is not None:
        return name_of_class(kind), own.take(value)
    if kind is Stripped:
        cls, args, *states = value.parts
        return name_of_class(cls), (args, {n: v for state in states for n, v in state.items()})
    if issubclass(kind, BaseException):
        cls, args, state = parts_of(value)
        if unicode_error(cls) is not None:  # its fields are its arguments
            state = {n: v for n, v in state.items() if n in vars(value)}
        return name_of_class(cls), (args, state)
    name = name_of_class(kind)
    if issubclass(kind, enum.Enum):
        return name, value._name_ if value._name_ in kind._member_map_ else value._value_
    if issubclass(kind, msgspec.Struct):
        return name, {field: getattr(value, field) for field in kind.__struct_fields__}
    _check_has_plain_state(kind)
    if issubclass(kind, tuple):
        return name, tuple(value)
    return name, dict(_state_of(value))


def _check_has_plain_state(kind: type) -> None:
    getstate = getattr(kind, "__getstate__", None)
    usual = (getattr(object, "__getstate__", None), getattr(torch.nn.Module, "__getstate__", None))
    is_usual = getstate in usual or getattr(getstate, "__module__", "") == "dataclasses"
    is_usual = is_usual and all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in _REDUCTIONS
        if not (name == "__getnewargs__" and issubclass(kind, tuple))
    )
    if not is_usual or kind in copyreg.dispatch_table:
        raise SerializationError(
            f"an object of type {name_of_class(kind)} is pickled in a way of its own, and the "
            "worker it goes to has a policy: it takes no pickles"
        )
    for base in kind.__mro__:
        if base not in (object, tuple) and not base.__flags__ & _IS_HEAP_TYPE:
            raise SerializationError(
                f"an object of type {name_of_class(kind)} is not plain data, and the worker it "
                "goes to has a policy: it takes no pickles"
            )


_IS_HEAP_TYPE = 1 << 9
_COMPILED = compiled_call_impl  # of modules; torch does not pickle it either


def _state_of(value: Any) -> Iterator[tuple[str, Any]]:
    with suppress(AttributeError):
        for name, attribute in object.__getattribute__(value, "__dict__").items():
            if name != _COMPILED:
                yield name, attribute
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is types.MemberDescriptorType:
                with suppress(AttributeError):
                    yield name, slot.__get__(value)


# Putting together -------------------------------------------------------------------------------


def object_of(name: str, parts: Any, only: Only) -> Any:
    """Return the object that these parts stand for.

    Raises:
        Refused: a policy does not allow objects of that class, or with that state.
        ValueError, TypeError: a class has no such object.
    """
    own = _OWN_BY_NAME.get(name)
    if own is not None:
        return own.make(_typed(parts, own.parts))
    kind = _EXCEPTIONS.get(name)
    if kind is None:
        kind = only.type_of(name)
    if issubclass(kind, BaseException):
        return _exception(kind, *_typed(parts, tuple))
    if issubclass(kind, enum.Enum):
        return _member(kind, parts)
    if issubclass(kind, tuple):
        items = _typed(parts, tuple)
        if len(items) != len(getattr(kind, "_fields", items)):
            raise ValueError(f"{name} has another number of fields")
        return tuple.__new__(kind, items)
    state = _typed(parts, dict)
    if issubclass(kind, msgspec.Struct):
        if "__post_init__" in dir(kind):
            raise Refused(f"an object of type {name!r} can't be made: it has a __post_init__")
        return kind(**state)
    made = object.__new__(kind)
    for attribute, value in state.items():
        _set(made, attribute, value)
    return made


def _typed(parts: Any, kind: type) -> Any:
    if type(parts) is not kind:
        raise ValueError(f"the parts of an object are no {kind.__name__}")
    return parts


def _member(kind: type[enum.Enum], parts: Any) -> enum.Enum:
    if type(parts) is str:
        return kind._member_map_[parts]
    if issubclass(kind, enum.Flag) and type(parts) is int:
        return combination(kind, parts)
    raise ValueError(f"{kind.__qualname__} has no such member")


def _set(made: Any, name: Any, value: Any) -> None:
    found = _field(type(made), name)
    if type(found) is types.MemberDescriptorType:
        found.__set__(made, value)
    else:
        object.__getattribute__(made, "__dict__")[name] = value


def _field(kind: type, name: Any) -> Any:
    """Return what a class has under a name, which may be an attribute of an object.

    Raises:
        Refused: the attribute would take the place of a method, or run code that sets it.
    """
    if type(name) is not str or (name.startswith("__") and name.endswith("__")):
        raise Refused(f"this worker takes no objects with an attribute {name!r:.100}")
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    is_code = hasattr(type(found), "__get__") or hasattr(type(found), "__set__")
    if is_code and found is not None and not isinstance(found, _FIELDS):
        raise Refused(
            f"this worker takes no objects that have {name!r} in place of their class's: "
            f"{name_of_class(kind)!r} defines it"
        )
    return found


def _exception(kind: type[BaseException], args: Any, state: Any) -> BaseException:
    args, state = checked_parts(kind, _typed(args, tuple), _typed(state, dict))
    notes = state.pop("__notes__", None)
    made = bare_exception(kind, args)
    initialize_exception(made, args)
    for name, value in state.items():
        _field(kind, name)
        set_attribute(made, name, value)
    if type(notes) is list:
        set_attribute(made, "__notes__", [note for note in notes if type(note) is str])
    return made


def check_attributes(attributes: Mapping[Any, Any], kind: type) -> None:
    """Check the attributes that a tensor is to have.

    Raises:
        Refused: one would take the place of one of torch's.
    """
    for name in attributes:
        if type(name) is not str or hasattr(kind, name):
            raise Refused(
                f"this worker takes no tensors that have {name!r:.100} in place of torch's"
            )
