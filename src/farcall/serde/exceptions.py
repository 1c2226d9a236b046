"""Exceptions as pickle, so that they arrive as themselves.

The standard reduction calls `Type(*args)` on arrival, which fails for every exception whose
`__init__` takes other arguments than it passes on. Here the instance is made by the built-in base's
`__new__` and `__init__` with the arguments that it had, then its attributes are set, and the user's
`__init__` does not run again. A type that says itself how to be pickled (`__reduce__`,
`__reduce_ex__`, copyreg) is left to its word. Stateless; safe from any thread.
"""

from __future__ import annotations

import copyreg
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class RemoteTraceback(Exception):
    """The cause of an exception that came from another worker: shows the traceback there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def _defining_class(cls: type, attribute: str) -> type:
    return next(base for base in cls.__mro__ if attribute in vars(base))


def _is_builtin(cls: type) -> bool:
    return cls.__module__ == "builtins"


def has_own_reduction(cls: type[BaseException]) -> bool:
    """Whether the type, or a base that is not built in, says how it is to be pickled."""
    return cls in copyreg.dispatch_table or not (
        _is_builtin(_defining_class(cls, "__reduce__"))
        and _is_builtin(_defining_class(cls, "__reduce_ex__"))
    )


def parts_of(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    """Type, constructor arguments of the built-in base, and attributes of an exception."""
    # The built-in reductions know what `args` does not tell, such as an OSError's file name.
    reduced: Any = error.__reduce__()
    state = reduced[2] if len(reduced) > 2 else None
    return type(error), tuple(reduced[1]), dict(state or {})


def reduce_exception(error: BaseException) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The reduction of an exception for which `has_own_reduction` is false."""
    return rebuild_exception, parts_of(error)


def rebuild_exception(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """An exception of this type, args and attributes, without running its own `__init__`."""
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise TypeError(f"{cls!r} is not an exception type")
    error = _new(cls, args)
    # Built-in bases keep fields outside of `args` and `__dict__` (errno, code, value, start, ...).
    with suppress(Exception):
        base: Any = next(b for b in cls.__mro__ if _is_builtin(b) and "__init__" in vars(b))
        base.__init__(error, *args)
    if not _is_builtin(_defining_class(cls, "__setstate__")):
        error.__setstate__(state)
        return error
    for name, value in state.items():
        set_attribute(error, name, value)
    return error


def set_attribute(error: BaseException, name: str, value: object) -> None:
    """Set it past the type's own `__setattr__`, with which frozen dataclasses refuse.

    An attribute that still can't be set is lost, rather than the exception.
    """
    with suppress(Exception):
        object.__setattr__(error, name, value)


def _new(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    try:
        return cls.__new__(cls, *args)
    except Exception as first:
        # The user's __new__ may want other arguments; and with two built-in bases only the one
        # that fixes the memory layout may be used, which need not be the first.
        for base in cls.__mro__:
            if _is_builtin(base) and issubclass(base, BaseException):
                with suppress(Exception):
                    return base.__new__(cls, *args)
        raise first


class Stripped:
    """Pickles as the exception it was made from, with its parts replaced.

    For exceptions that hold what can't be pickled: see `farcall.serde.failures`.
    """

    __slots__ = ("_parts",)

    def __init__(
        self, cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
    ) -> None:
        self._parts = (cls, args, state)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return rebuild_exception, self._parts


def type_name_of(error: BaseException) -> str:
    """Qualified name of the exception's type; built-in ones without their module."""
    cls = type(error)
    return cls.__qualname__ if _is_builtin(cls) else f"{cls.__module__}.{cls.__qualname__}"


def message_of(error: BaseException) -> str:
    """`str(error)`, or a note that it failed."""
    try:
        return _encodable(str(error))
    except Exception as failure:
        return f"<str() of the exception raised {type(failure).__name__}>"


def traceback_of(error: BaseException) -> str:
    """The traceback as text, with those of its causes and contexts."""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except Exception as failure:
        return f"<formatting the traceback raised {type(failure).__name__}>\n"
    return _encodable("".join(lines))


def _encodable(text: str) -> str:
    # File names that are not UTF-8 carry lone surrogates, which can't go on the wire.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
