"""Graphs of TorchScript: calls of farcall in the place of nodes that need an agent in C++.

A graph is changed when it was just compiled, and has not run. What TorchScript says of a remote
call while it compiles it, and the types that it has, is torch's doing.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from farcall import torch_internals as internals
from farcall.compat.rpc.scripted_calls import (
    CALLS,
    FUNCTIONS,
    GRADIENTS,
    LET_OTHERS_WORK,
    OWNER_NAME,
    UNWRAPPED,
    compiled_function,
    do,
    note_python,
)
from farcall.compat.rpc.scripted_references import (
    boxed_type,
    contains,
    has_references,
    note_compiled,
)

_ANY, _BOOL = internals.AnyType.get(), internals.BoolType.get()
_NONE, _STRING = internals.NoneType.get(), internals.StringType.get()
_FUTURES_COME_FROM = (
    "prim::rpc_async",
    "prim::PythonOp",
    "prim::CallFunction",
    "prim::CallMethod",
    "prim::GetAttr",
)


def adapt(graph: Any) -> None:
    """Let a graph that was just compiled do by farcall what it does remotely."""
    gets_futures = _gets_futures(graph)
    for node in graph.findAllNodes("prim::PythonOp"):
        if node.pyobj() is not do and _has_references(node):
            _replace(graph, node, note_python(node.pyobj()))
    for node in graph.findAllNodes("aten::owner"):
        if all(use.user.kind() in CALLS for use in node.output().uses()):
            _replace(graph, node, OWNER_NAME, _STRING)
    for kind in FUNCTIONS:
        for node in graph.findAllNodes(kind):
            if kind != "aten::save" or _has_references(node):
                _replace(graph, node, kind)
    if gets_futures:
        for node in graph.findAllNodes("aten::wait"):
            _replace_wait(graph, node)
    for node in graph.findAllNodes("prim::fork"):
        adapt(node.g("Subgraph"))


def _gets_futures(graph: Any) -> bool:
    """Return whether there may be futures other than those of what the graph itself forks.

    Else its waits stay as they are: with calls of Python it can't be saved.
    """
    sources = (node for kind in _FUTURES_COME_FROM for node in graph.findAllNodes(kind))
    values = (*graph.inputs(), *(value for node in sources for value in node.outputs()))
    return any(contains(value.type(), "FutureType") for value in values)


def _has_references(node: Any) -> bool:
    return any(has_references(value.type()) for value in (*node.inputs(), *node.outputs()))


def _replace(graph: Any, node: Any, kind: str, result_type: Any = None) -> None:
    """Put a call in the place of a node. It gives the same type if none is named."""
    graph.setInsertPoint(node)
    outputs = list(node.outputs())
    if result_type is None:
        result_type = outputs[0].type() if outputs else _NONE
    result = _insert_call(graph, node, kind, list(node.inputs()), result_type)
    for output in outputs:
        output.replaceAllUsesWith(result)
    node.destroy()


def _replace_wait(graph: Any, node: Any) -> None:
    """Let torch wait, and unwrap what comes if TorchScript does not know what it is."""
    future, result_type = node.input(), node.output().type()
    graph.setInsertPoint(node)
    _insert_call(graph, node, LET_OTHERS_WORK, [future], _NONE)
    result = _insert(graph, "aten::wait", [future], _ANY)
    result.node().copyMetadata(node)
    is_known = _insert(graph, "prim::isinstance", [result], _BOOL)
    is_known.node().tys_("types", [result_type])
    typed = _insert(graph, "prim::If", [is_known], result_type)
    known, unknown = typed.node().addBlock(), typed.node().addBlock()
    graph.setInsertPoint(known)
    known.registerOutput(_insert(graph, "prim::unchecked_cast", [result], result_type))
    graph.setInsertPoint(unknown)
    unknown.registerOutput(_insert_call(graph, node, UNWRAPPED, [result], result_type))
    node.output().replaceAllUsesWith(typed)
    node.destroy()


def _insert(graph: Any, kind: str, inputs: list[Any], result_type: Any) -> Any:
    """Gives the value of a new node."""
    value = graph.insertNode(graph.create(kind, inputs, 1)).output()
    value.setType(result_type)
    return value


def _insert_call(graph: Any, node: Any, kind: str, inputs: list[Any], result_type: Any) -> Any:
    """Gives the value of a new call of `do`.

    Args:
        node: what it stands for, in messages of errors.
    """
    types = [value.type() for value in inputs]
    references = any(map(has_references, (*types, result_type)))
    given = _insert(graph, "prim::TupleConstruct", inputs, internals.TupleType(types))
    arguments = iter((graph.insertConstant(kind), given, graph.insertConstant(references)))
    call = graph.insertNode(graph.createClone(_template(), lambda _: next(arguments)))
    call.copyMetadata(node)
    result = call.output()
    result.setType(boxed_type(result_type))
    if not has_references(result_type):
        return result
    return _insert(graph, "prim::unchecked_cast", [result], result_type)


def _calls_do(kind: str, inputs: Any, references: bool) -> Any:
    return do(kind, inputs, references)


@functools.cache
def _template() -> Any:
    """Return a node that calls `do`. Python can't make such a node, but it can copy one."""
    return torch.jit.script(_calls_do).graph.findNode("prim::PythonOp")


# Where torch compiles.


def _compiling_functions(compile_function: Callable[..., Any]) -> Callable[..., Any]:
    def compile_and_adapt(*args: Any) -> Any:
        compiled = compile_function(*args)
        _adapt_function(compiled)
        return compiled

    return compile_and_adapt


def _compiling_classes(compile_class: Callable[..., Any]) -> Callable[..., Any]:
    def compile_and_adapt(*args: Any) -> Any:
        compiled = compile_class(*args)
        _adapt_methods(compiled, compiled.method_names())
        return compiled

    return compile_and_adapt


_create_methods = internals.jit_recursive.create_methods_and_properties_from_stubs
_create_hooks = internals.jit_recursive.create_hooks_from_stubs


def create_methods_and_adapt(concrete_type: Any, method_stubs: Any, property_stubs: Any) -> None:
    """Compiles methods of a module. Not all of them: others may be compiled just now."""
    _create_methods(concrete_type, method_stubs, property_stubs)
    names = [stub.def_.name() for stub in method_stubs]
    for stub in property_stubs:
        names += [stub.def_.getter_name(), stub.def_.setter_name()]
    _adapt_methods(concrete_type.jit_type, [name.name for name in names if name is not None])


def create_hooks_and_adapt(concrete_type: Any, hook_stubs: Any, pre_hook_stubs: Any) -> None:
    """Compiles what runs before and after `forward` of a module."""
    _create_hooks(concrete_type, hook_stubs, pre_hook_stubs)
    names = {stub.def_.name().name for stub in (*hook_stubs, *pre_hook_stubs)}
    _adapt_methods(concrete_type.jit_type, names)


def _adapt_methods(kind: Any, names: Iterable[str]) -> None:
    for name in names:
        _adapt_function(compiled_function(f"{kind.qualified_name()}.{name}"))


def _adapt_function(function: Any) -> None:
    adapt(function.graph)
    note_compiled(function.qualified_name, function.graph)


def install(swap: Any) -> None:
    """Adapt code that is compiled from now on.

    Before torch.distributed.autograd is replaced: torch may make its table of built-in functions
    when it is first asked for, of the functions that are there then.
    """
    for name, compiling in (
        ("jit_script_compile", _compiling_functions),
        ("jit_script_compile_overload", _compiling_functions),
        ("jit_script_class_compile", _compiling_classes),
    ):
        swap.attribute(*internals.place_of(name), compiling(getattr(*internals.place_of(name))))
    recursive = internals.jit_recursive
    swap.attribute(recursive, "create_methods_and_properties_from_stubs", create_methods_and_adapt)
    swap.attribute(recursive, "create_hooks_from_stubs", create_hooks_and_adapt)
    builtins = internals.get_builtin_table()
    for kind, function in GRADIENTS.items():
        swap.item(builtins, id(function), kind)
