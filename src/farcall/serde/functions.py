"""Functions by name: "module:qualname" and back.

A name is given only when looking it up leads back to the very same object, so what the callee
finds under it is what the caller meant, however `__module__` and `__qualname__` may lie (as after
`functools.wraps`). Nothing is imported to find a name; importing is the callee's side, `resolve`.
Safe from any thread; the only state is the cache of a `Functions` object.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from farcall.errors import FunctionNotFound
from farcall.serde.exceptions import message_of, type_name_of
from farcall.torch_internals import OpOverload, OpOverloadPacket, ScriptFunction, TensorBase

MAIN = "__main__"
# The name that multiprocessing's spawn gives the parent's __main__ in the child.
SPAWNED_MAIN = "__mp_main__"

_ADVICE = (
    "it must be importable on the callee too (the RPC pickler does not serialize function code)"
)
_ADVICE_FOR_MAIN = (
    '; define it at the top level of the script and above `if __name__ == "__main__":`, since '
    "workers that import the script skip what stands behind that line"
)
_OPERATORS = (OpOverloadPacket, OpOverload)
# TorchScript puts this between module and name when it compiles a second function of that name.
_MANGLED = re.compile(r"\.___torch_mangle_\d+")


def name_of(function: Any) -> str | None:
    """Return the "module:qualname" under which any worker with the same code finds this callable.

    None for what has no such name: lambdas, local functions, partials, bound methods of instances.
    """
    try:
        module: str = function.__module__
        name: str = function.__qualname__
        namespace = sys.modules[module].__dict__
        if namespace.get(name) is not function:
            # As torch.add, which says that it is _VariableFunctionsClass.add.
            name = function.__name__
        if namespace[name] is function:
            return f"{MAIN if module == SPAWNED_MAIN else module}:{name}"
    except Exception:
        # Callable objects may run user code in __getattr__, which may raise anything.
        pass
    return _search_name(function)


def _search_name(function: Any) -> str | None:
    for module, name in _candidates(function):
        if not isinstance(module, str) or not isinstance(name, str):
            continue
        if module not in sys.modules:
            continue
        try:
            found = _walk(sys.modules[module], name)
        except AttributeError:
            continue
        if found is function or _is_equal(found, function):
            return f"{MAIN if module == SPAWNED_MAIN else module}:{name}"
    return None


def _is_equal(found: Any, function: Any) -> bool:
    """Return whether two functions are equal, of which each look may give a new object."""
    if isinstance(function, ScriptFunction):
        # No other compiled function has its name.
        name = _attribute(found, "qualified_name")
        return type(found) is type(function) and name == function.qualified_name
    is_class_method = isinstance(_attribute(function, "__self__"), type)
    return is_class_method and found == function


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _candidates(function: Any) -> Iterator[tuple[Any, Any]]:
    """Return the places to look for it, likeliest first."""
    if isinstance(function, ScriptFunction):
        # Its __module__ and __qualname__ are those of the class ScriptFunction.
        path = _MANGLED.sub("", function.qualified_name).removeprefix("__torch__.")
        module, _, name = path.rpartition(".")
        yield from ((module, name),) if module else ((MAIN, name), (SPAWNED_MAIN, name))
        return
    if isinstance(function, _OPERATORS):
        yield "torch", f"ops.{function}"
        return
    module = _attribute(function, "__module__")
    qualname = _attribute(function, "__qualname__")
    name = _attribute(function, "__name__")
    yield module, qualname
    # F.max_pool2d says that it is a local function.
    yield module, name
    if not isinstance(name, str):
        return
    owner = _attribute(function, "__objclass__") or _attribute(function, "__self__")
    if owner is TensorBase:
        yield "torch", f"Tensor.{name}"
    if isinstance(owner, type):
        yield owner.__module__, f"{owner.__qualname__}.{name}"


def _walk(start: Any, path: str) -> Any:
    for part in path.split("."):
        start = getattr(start, part)
    return start


def resolve(name: str) -> Callable[..., Any]:
    """Return the callable of this name, importing its module when needed.

    Raises:
        FunctionNotFound: no such module or attribute here, or it can't be called.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise FunctionNotFound(f"{name!r} is not a function name of the form 'module:name'")
    found: Any = _import(module_name, path.partition(".")[0], name)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            where = _describe(found, module_name)
            raise FunctionNotFound(
                f"can't find {name!r}: {where} has no attribute {part!r}; {_advice(module_name)}"
            ) from error
    if not callable(found):
        raise FunctionNotFound(f"{name!r} is not callable, it is {_describe(found, module_name)}")
    return found  # type: ignore[no-any-return]


def _advice(module_name: str) -> str:
    return _ADVICE + (_ADVICE_FOR_MAIN if module_name in (MAIN, SPAWNED_MAIN) else "")


def _describe(found: Any, module_name: str) -> str:
    if found is sys.modules.get(module_name):
        return f"module {module_name!r}"
    return f"{type(found).__name__} {getattr(found, '__qualname__', '')!r}"


def _import(module_name: str, attribute: str, name: str) -> Any:
    if module_name == SPAWNED_MAIN:
        module_name = MAIN
    module = sys.modules.get(module_name)
    # A module that lacks the attribute may be one that another thread is importing just now: import
    # it too, which waits for that thread.
    if module is not None and hasattr(module, attribute):
        return module
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise FunctionNotFound(
            f"can't find {name!r}: no module named {error.name!r}; {_ADVICE}"
        ) from error
    except Exception as error:
        # A module may raise anything at all while it is being imported.
        raise FunctionNotFound(
            f"can't find {name!r}: importing {module_name!r} failed with "
            f"{type_name_of(error)}: {message_of(error)}; {_ADVICE}"
        ) from error


class Functions:
    """`resolve` with memory, for the hot path.

    It remembers the namespace and not the function, so a function that is replaced (a notebook
    cell run again, `importlib.reload`, a test's monkeypatch) is seen at once.
    """

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[str, tuple[dict[str, Any], str]] = {}

    def resolve(self, name: str) -> Callable[..., Any]:
        """Return the function of a name, as the module's `resolve` does.

        Raises:
            FunctionNotFound: no such module or attribute here, or it can't be called.
        """
        try:
            namespace, attribute = self._places[name]
            return namespace[attribute]  # type: ignore[no-any-return]
        except KeyError:
            pass
        function = resolve(name)
        module_name, _, attribute = name.partition(":")
        # Names inside classes must go through getattr, which binds and unwraps methods.
        module = sys.modules.get(MAIN if module_name == SPAWNED_MAIN else module_name)
        namespace = getattr(module, "__dict__", {})
        if attribute in namespace:
            self._places[name] = (namespace, attribute)
        return function
