"""`torch.compile` does not look into farcall: it breaks its graph around each call of it.

What Dynamo looks at are marks on functions and on their code. They can be set without importing
Dynamo, which takes a second.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from farcall import torch_internals as internals

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])

MARK = internals.torchdynamo_disable


def breaks_graphs(function: F) -> F:
    """Mark a function: code that is compiled calls it as it is."""
    plain = inspect.unwrap(function)
    if isinstance(plain, FunctionType):
        setattr(plain, MARK, True)
        _skip_frames_of(plain)
    return function


def methods_break_graphs(cls: C) -> C:
    """Mark all methods that a class defines."""
    for member in vars(cls).values():
        for function in _functions_of(member):
            breaks_graphs(function)
    return cls


def module_breaks_graphs(module: ModuleType) -> None:
    """Mark all functions that a module defines, and the methods of its classes."""
    for member in list(vars(module).values()):
        if getattr(member, "__module__", None) != module.__name__:
            continue
        if isinstance(member, FunctionType):
            breaks_graphs(member)
            setattr(member, MARK, True)  # if it is wrapped, the wrapped one has the mark now
        elif isinstance(member, type):
            methods_break_graphs(member)


def _functions_of(member: Any) -> Iterable[Callable[..., Any]]:
    if isinstance(member, classmethod | staticmethod):
        return [member.__func__]
    if isinstance(member, property):
        return [one for one in (member.fget, member.fset, member.fdel) if one is not None]
    return [member] if isinstance(member, FunctionType) else []


def _skip_frames_of(function: FunctionType) -> None:
    """Mark the function so that neither its frame nor any frame that it calls is compiled.

    Older versions of torch have no such mark. There Dynamo looks at farcall's frames one by one.
    """
    compiled: Any = internals.eval_frame
    if hasattr(compiled, "set_code_exec_strategy"):
        skip = internals.FrameAction.SKIP
        strategy = internals.FrameExecStrategy(skip, skip)
        compiled.set_code_exec_strategy(function.__code__, strategy)
