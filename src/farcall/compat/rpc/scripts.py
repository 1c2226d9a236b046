"""TorchScript, where torch.distributed.rpc cares for it and farcall by itself does not.

`scripted_calls` has the remote calls that scripted code makes itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from farcall import torch_internals as internals
from farcall.compat.rpc.scripted_references import call_function, call_method
from farcall.rref import RRef
from farcall.runtime.calls.future import Future
from farcall.runtime.context import CallContext, current_context

# Messages of torch's C++ code about scripted code that needs an agent, or references, of C++.
_COMPLAINTS = ("RPC agent is not set", "Expected a value of type 'RRef")


def _prepared(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a scripted one from Python.

    Futures and the context of this thread are given to it in a form that it can use. If it needs
    what farcall has not, the error says so.
    """

    def prepared_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {name: _for_script(value) for name, value in kwargs.items()}
        try:
            with _handing_on():
                return call(self, *map(_for_script, args), **named)
        except RuntimeError as error:
            if not any(complaint in str(error) for complaint in _COMPLAINTS):
                raise
            raise NotImplementedError(
                f"{self.name} makes remote calls or uses RRefs, but was not compiled by "
                "torch.jit.script after farcall.compat.install: as it is it needs an agent in "
                "C++, which farcall has not; see docs/migrate.md, TorchScript"
            ) from error

    return prepared_call


# Futures.


def for_torch(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Return a future that torch's C++ code, too, finds failed when it has failed."""
    then: Any = internals.Future.then  # past ours, of whose failures only Python knows
    return then(future, lambda done: done.value())  # type: ignore[no-any-return]


def _for_script(value: Any) -> Any:
    if isinstance(value, Future):
        return for_torch(value)
    if type(value) in (list, tuple) and any(isinstance(item, Future) for item in value):
        return type(value)(map(_for_script, value))
    return value


# The context of a call, in threads that scripted code forks.

_CONTEXT = "farcall's call context"  # a key of what torch hands on to those threads


@contextlib.contextmanager
def _handing_on() -> Iterator[None]:
    context = current_context()
    if context is None:
        yield
        return
    outer = handed_on()
    internals.stash_obj_in_tls(_CONTEXT, context)
    try:
        yield
    finally:
        if outer is None:
            _drop(_CONTEXT)
        else:
            internals.stash_obj_in_tls(_CONTEXT, outer)


def _drop(key: str) -> None:
    if internals.has("remove_obj_from_tls"):
        internals.remove_obj_from_tls(key)
    else:  # older torch; `handed_on` takes it for no context
        internals.stash_obj_in_tls(key, None)


def handed_on() -> CallContext | None:
    """Return the context of the call to which a thread that scripted code forked belongs."""
    is_there = internals.is_key_in_tls(_CONTEXT)
    return internals.get_obj_in_tls(_CONTEXT) if is_there else None


# torch's demands on arguments.


def check_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RuntimeError if a scripted function takes less arguments than these."""
    most, count = len(function.schema.arguments), len(args) + len(kwargs)
    if count > most:
        raise RuntimeError(
            f"{function.name}() expected at most {most} argument(s) but received {count} "
            f"argument(s). Declaration: {function.schema}"
        )


def make(self: RRef[Any], value: Any, type_hint: Any = None) -> None:
    """`RRef(value)`; a script module needs its interface, which TorchScript would go by."""
    if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
        raise RuntimeError(
            "The RRef being created contains a ScriptModule, must provide its ModuleInterface type "
            "hint."
        )
    if isinstance(value, torch.jit.ScriptModule):
        _interfaces[value] = type_hint
    original_make(self, value, type_hint)


original_make = RRef.__init__
_interfaces: WeakKeyDictionary[torch.jit.ScriptModule, Any] = WeakKeyDictionary()


def interface_of(value: Any) -> Any:
    """Return the interface with which a reference to a script module was made here, or None."""
    return _interfaces.get(value) if isinstance(value, torch.jit.ScriptModule) else None


def install(swap: Any) -> None:
    """Change the classes of scripted functions and of references."""
    swap.attribute(internals.ScriptFunction, "__call__", _prepared(call_function))
    swap.attribute(internals.ScriptMethod, "__call__", _prepared(call_method))
    swap.attribute(RRef, "__init__", make)
