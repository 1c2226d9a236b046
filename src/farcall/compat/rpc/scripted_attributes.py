"""References in attributes of script modules.

TorchScript wants to know the type of an attribute when it compiles a module, so the owner of a
reference is asked what it holds. The attribute itself has a box (`scripted_references`).
"""

from __future__ import annotations

import itertools
from typing import Any

from farcall import torch_internals as internals
from farcall.compat.rpc import api
from farcall.compat.rpc.scripted_references import boxed, unboxed
from farcall.compat.rpc.scripts import interface_of
from farcall.rref import RRef

_INTERFACE, _CLASS, _OTHER = "interface", "class", "other"
_numbers = itertools.count()
_names: set[str] = set()  # of attributes that have had references

_infer = internals.jit_try_infer_type
_ScriptModule: Any = internals.ScriptModule
_set, _get = _ScriptModule.setattr, _ScriptModule.getattr


def infer_type(value: Any) -> Any:
    """`torch._C._jit_try_infer_type`, also of references, alone or in containers."""
    if not _holds_references(value):
        return _infer(value)
    if isinstance(value, RRef):
        return _infer_reference(value)
    items = [infer_type(item) for item in _items(value)]
    for inferred in items:
        if not inferred.success():
            return inferred
    types = [inferred.type() for inferred in items]
    if isinstance(value, tuple):
        return internals.InferredType(internals.TupleType(types))
    if any(not kind.isSubtypeOf(types[0]) for kind in types):
        return internals.InferredType(f"there are references of several types in {value!r}")
    if isinstance(value, list):
        return internals.InferredType(internals.ListType(types[0]))
    key = _infer(next(iter(value))).type()
    return internals.InferredType(internals.DictType(key, types[0]))


def _holds_references(value: Any) -> bool:
    return isinstance(value, RRef) or any(map(_holds_references, _items(value)))


def _items(value: Any) -> list[Any]:
    if type(value) is dict:
        return list(value.values())
    return list(value) if type(value) in (list, tuple) else []


def _infer_reference(rref: RRef[Any]) -> Any:
    try:
        named = _type_named(api.rpc_sync(rref.owner(), name_of_type, args=(rref,)))
    except Exception as error:  # an attribute that no method uses needs no type
        return internals.InferredType(f"{rref!r} is of no use: {error}")
    if named is None:
        return internals.InferredType(f"TorchScript has no type for what {rref!r} holds")
    return internals.InferredType(internals.RRefType(named))


def name_of_type(rref: RRef[Any]) -> tuple[str, str] | None:
    """Return, at the owner, the type of a reference's value, for `_type_named`; or None."""
    value = rref.local_value()
    interface = interface_of(value)
    if interface is not None:
        return _INTERFACE, internals.qualified_name(interface)
    inferred = _infer(value)
    if not inferred.success():
        return None
    kind = inferred.type()
    return (_CLASS if kind.kind() == "ClassType" else _OTHER), str(kind.str())


def _type_named(named: tuple[str, str] | None) -> Any:
    if named is None:
        return None
    kind, name = named
    compiled = internals.python_cu
    if kind == _INTERFACE:
        return compiled.get_interface(name)
    if kind == _CLASS:
        return compiled.get_class(name)
    graph = internals.parse_ir(f"graph(%value : {name}):\n  return (%value)")
    return next(iter(graph.inputs())).type()


def set_attribute(module: Any, name: str, value: Any) -> None:
    """`torch._C.ScriptModule.setattr`."""
    if not _holds_references(value):
        _set(module, name, value)
        return
    _names.add(name)
    box = boxed(value)
    graph: Any = internals.Graph()
    into, given = graph.addInput("self"), graph.addInput("value")
    into.setType(internals.type_of(module)())
    given.setType(_infer(box).type())
    setting = graph.insertNode(graph.create("prim::SetAttr", [into, given], 0))
    setting.s_("name", name)
    graph.registerOutput(graph.insertConstant(None))
    setter = internals.create_function_from_graph(
        f"__torch__.farcall_setter_{next(_numbers)}.{name}", graph
    )
    setter(module, box)


def get_attribute(module: Any, name: str) -> Any:
    """`torch._C.ScriptModule.getattr`."""
    value = _get(module, name)
    return unboxed(value) if name in _names else value


def install(swap: Any) -> None:
    """Let modules have such attributes."""
    swap.attribute(*internals.place_of("jit_try_infer_type"), infer_type)
    swap.attribute(_ScriptModule, "setattr", set_attribute)
    swap.attribute(_ScriptModule, "getattr", get_attribute)
