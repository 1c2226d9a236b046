"""Exceptions as pickle, so that they arrive as themselves, and as parts, so that they can be kept.

The standard reduction calls `Type(*args)` on arrival, which fails for every exception whose
`__init__` takes other arguments than it passes on. Here the instance is made by the built-in base's
`__new__` and `__init__` with the arguments that it had, then its attributes are set, and the user's
`__init__` does not run again. The type's own `__setstate__` runs where pickle would call it. A type
that says itself how to be pickled (`__reduce__`, `__reduce_ex__`, copyreg) is left to its word.
Stateless; safe from any thread.

An exception is an object of the user: all its special methods may raise anything. Functions that
must not fail say so, and read and write exceptions past those methods.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from farcall.serde.tracebacks import (
    MAX_EARLIER,
    MAX_NAME,
    cause_of,
    clipped,
    context_of,
    encodable,
    frames_of,
    traceback_from,
    traceback_of_exception,
)

MAX_CHAIN = MAX_EARLIER  # exceptions in a chain of causes that is kept

# The attributes that farcall gives to an exception on arrival; no type's `__setstate__` sees them.
ARRIVAL_ATTRIBUTES = ("remote_worker", "remote_traceback")


class RemoteTraceback(Exception):
    """The cause of an exception that came from another worker.

    Attributes:
        text: the traceback there. Printed as part of a traceback, it shows only what the frames of
            the exception itself don't: `header`, and earlier exceptions.
        header: says which worker it was.
    """

    def __init__(self, text: str, header: str = "", *, shows_text: bool = True) -> None:
        super().__init__(text, header)
        self.text = text
        self.header = header
        self.shows_text = shows_text

    def __str__(self) -> str:
        return f'\n"""{self.header}\n{self.text.rstrip()}\n"""' if self.shows_text else self.header


def _defining_class(cls: type, attribute: str) -> type:
    return next(base for base in cls.__mro__ if attribute in vars(base))


def _is_builtin(cls: type) -> bool:
    return cls.__module__ == "builtins"


def has_own_reduction(cls: type[BaseException]) -> bool:
    """Return whether the type, or a base that is not built in, says how it is to be pickled."""
    return cls in copyreg.dispatch_table or not (
        _is_builtin(_defining_class(cls, "__reduce__"))
        and _is_builtin(_defining_class(cls, "__reduce_ex__"))
    )


def parts_of(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    """Return type, constructor arguments of the built-in base, and attributes of an exception.

    No code of the user runs.
    """
    cls = type(error)
    args, state = _reduced(error)
    for owner in cls.__mro__:
        for name in _fields_of(owner):
            with suppress(AttributeError):
                value = vars(owner)[name].__get__(error)
                # A built-in field that was never set is None.
                if value is not None or not _is_builtin(owner):
                    state.setdefault(name, value)
    return cls, args, state


def _reduced(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and the state that the built-in reduction gives."""
    # The built-in reductions know what `args` does not tell, such as an OSError's file name.
    base: Any = next(b for b in type(error).__mro__ if _is_builtin(b) and "__reduce__" in vars(b))
    reduced: Any = base.__reduce__(error)
    return tuple(reduced[1]), dict((reduced[2] if len(reduced) > 2 else None) or {})


def _fields_of(owner: type) -> Iterator[str]:
    """Yield the attributes of a class outside of `__dict__`: slots, fields of built-in classes."""
    if owner in _WITHOUT_FIELDS or (not _is_builtin(owner) and "__slots__" not in vars(owner)):
        return
    for name, value in vars(owner).items():
        if type(value) is MemberDescriptorType or type(value) is GetSetDescriptorType:
            yield name


# Of these all that counts is kept in another way.
_WITHOUT_FIELDS = frozenset((object, BaseException, BaseExceptionGroup))


def reduce_exception(error: BaseException) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the reduction of an exception for which `has_own_reduction` is false."""
    cls, args, state = parts_of(error)
    return rebuild_exception, (cls, args, *split_state(error, state))


def split_state(error: BaseException, state: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the attributes to be set one by one, and those for `__setstate__`, if there are any.

    Pickle hands an exception's `__dict__` to `__setstate__`, if there is something in it, and
    never asks `__getstate__`. A `__setstate__` that expects another kind of state, such as the list
    of a dataclass with slots, would take the names of the attributes for values. So that method
    gets nothing, and all attributes are set one by one.
    """
    given = _given_to_setstate(error)
    if not given:
        return (dict(state),)
    one_by_one = {name: value for name, value in state.items() if name not in given}
    return one_by_one, {name: value for name, value in state.items() if name in given}


def _given_to_setstate(error: Any) -> frozenset[str]:
    cls = type(error)
    if _is_builtin(_defining_class(cls, "__setstate__")):
        return frozenset()
    names = frozenset(_reduced(error)[1]).difference(ARRIVAL_ATTRIBUTES)
    if names and not _is_builtin(_defining_class(cls, "__getstate__")):
        with suppress(Exception):
            if isinstance(error.__getstate__(), dict):
                return names
        return frozenset()
    return names


def rebuild_exception(
    cls: type[BaseException],
    args: tuple[Any, ...],
    state: dict[str, Any],
    given: dict[str, Any] | None = None,
) -> BaseException:
    """Make an exception of this type, without running its own `__init__`.

    Args:
        cls: the type.
        args: the arguments for the built-in base.
        state: the attributes to be set one by one.
        given: the attributes for the type's own `__setstate__`; None or empty: it is not called.
            If it raises, they are set one by one, too.
    """
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise TypeError(f"{cls!r} is not an exception type")
    error = _new(cls, args)
    initialize(error, args)
    if given:
        try:
            error.__setstate__(dict(given))
        except Exception:
            _set_attributes(error, given)
    # Afterwards, for a `__setstate__` may take what it gets for something else.
    _set_attributes(error, state)
    return error


def _set_attributes(error: BaseException, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        set_attribute(error, name, value)


def reduce_by_own_word(error: BaseException) -> Any:
    """Return the reduction of an exception for which `has_own_reduction` is true.

    The type's reduction is changed only for an exception that came from another worker: the type's
    `__setstate__` gets none of `ARRIVAL_ATTRIBUTES`.
    """
    reduced = error.__reduce_ex__(5)
    if type(reduced) is not tuple or len(reduced) < 3 or type(reduced[2]) is not dict:
        return reduced
    state = dict(reduced[2])
    ours = {name: state.pop(name) for name in ARRIVAL_ATTRIBUTES if name in state}
    if not ours or (len(reduced) > 5 and reduced[5] is not None):
        return reduced
    items = (*reduced[3:5], None, None)[:2]
    return (*reduced[:2], (state, ours), *items, set_split_state)


def set_split_state(error: Any, states: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Give an exception the state that its type's reduction gave, then farcall's attributes."""
    state, ours = states
    if state:
        error.__setstate__(state)
    _set_attributes(error, ours)


def copy_of(
    error: BaseException, made_before: dict[int, BaseException] | None = None
) -> BaseException:
    """Make an equal exception, without its traceback, causes and context.

    No code of the user runs. Its arguments and attributes are the same objects, but for exceptions
    among them, which are copied, too.

    Raises:
        TypeError: its type can't be made so; that takes a base of a kind that Python itself does
            not have.
    """
    copies = {} if made_before is None else made_before
    cls, args, state = parts_of(error)
    args = tuple([_detached(value, copies) for value in args])
    made = bare(cls, args)
    copies[id(error)] = made
    initialize(made, args)
    for name, value in state.items():
        set_attribute(made, name, _detached(value, copies))
    return made


def _detached(value: Any, copies: dict[int, BaseException]) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_detached(item, copies) for item in value])
    if not issubclass(kind, BaseException):
        return value
    if id(value) not in copies:
        return copy_of(value, copies)
    return copies[id(value)]


def initialize(error: BaseException, args: tuple[Any, ...]) -> None:
    """Give an exception its arguments, by the `__init__` of its built-in base."""
    # Built-in bases keep fields outside of `args` and `__dict__` (errno, code, value, start, ...).
    with suppress(Exception):
        base: Any = next(b for b in type(error).__mro__ if _is_builtin(b) and "__init__" in vars(b))
        base.__init__(error, *args)


def set_attribute(error: BaseException, name: str, value: object) -> None:
    """Set it past the type's own `__setattr__`, with which frozen dataclasses refuse.

    An attribute that still can't be set is lost, rather than the exception.
    """
    with suppress(BaseException):
        object.__setattr__(error, name, value)


def get_attribute(error: BaseException, name: str) -> Any:
    """Return an attribute of the instance past all that its type defines; None without it."""
    with suppress(BaseException):
        if any(name in vars(base) for base in type(error).__mro__):
            return object.__getattribute__(error, "__dict__").get(name)
        # This makes no `__dict__`: pickle calls `__setstate__` of an exception that has one.
        return object.__getattribute__(error, name)
    return None


def _new(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    try:
        return cls.__new__(cls, *args)
    except Exception as first:
        # The user's __new__ may want other arguments.
        try:
            return bare(cls, args)
        except TypeError:
            raise first from None


def bare(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an instance made by a built-in base.

    With two of them only the one that fixes the memory layout may be used, which need not be the
    first.
    """
    for base in cls.__mro__:
        if _is_builtin(base) and issubclass(base, BaseException):
            with suppress(Exception):
                return base.__new__(cls, *args)
    raise TypeError(f"can't make an instance of {cls!r}")


class StoredError:
    """An exception that is kept, to be raised later by anyone any number of times.

    It holds the parts of the exception (type, arguments, attributes, the places of its frames, and
    its causes), and none of the frames: a frame keeps all its local variables, and a raised
    exception collects the frames that it is raised through. So each `error` is a new exception.

    No code of the user runs here. Thread-safe.
    """

    __slots__ = ("_cause", "_context", "_copy", "_frames", "_hides_context", "_is_only_one")

    def __init__(self, error: BaseException, depth: int = MAX_CHAIN) -> None:
        self._frames = frames_of(traceback_of_exception(error))
        self._hides_context = bool(vars(BaseException)["__suppress_context__"].__get__(error))
        cause, context = cause_of(error), context_of(error)
        self._cause = None if cause is None or not depth else StoredError(cause, depth - 1)
        self._context = None
        if context is not None and context is not cause and depth and not self._hides_context:
            self._context = StoredError(context, depth - 1)
        self._is_only_one = False
        try:
            self._copy = copy_of(error)
        except BaseException:
            # Python can't make a second one: the same is raised each time, without its frames.
            self._is_only_one = True
            self._copy = error
            BaseException.with_traceback(error, None)
            for name in ("__cause__", "__context__"):
                _set(error, name, None)

    @property
    def type(self) -> type[BaseException]:
        """The type of the exception."""
        return type(self._copy)

    @property
    def type_name(self) -> str:
        """The qualified name of the type. Never raises."""
        return type_name_of(self._copy)

    def error(self) -> BaseException:
        """Return a new exception, to be raised."""
        made = self._copy if self._is_only_one else copy_of(self._copy)
        BaseException.with_traceback(made, traceback_from(self._frames))
        if self._cause is not None:
            _set(made, "__cause__", self._cause.error())
        if self._context is not None:
            _set(made, "__context__", self._context.error())
        _set(made, "__suppress_context__", self._hides_context)
        return made


def _set(error: BaseException, name: str, value: Any) -> None:
    vars(BaseException)[name].__set__(error, value)


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set the cause, past a property of that name."""
    _set(error, "__cause__", cause)


def set_context(error: BaseException, context: BaseException) -> None:
    """Set the context, so that it is shown."""
    _set(error, "__context__", context)
    _set(error, "__suppress_context__", False)


def earlier_than(error: BaseException) -> Iterator[tuple[bool, BaseException]]:
    """Return what Python shows above an exception, the nearest first: whether a cause, and it."""
    known = {id(error)}
    for _ in range(MAX_CHAIN):
        cause, context = cause_of(error), context_of(error)
        hides = vars(BaseException)["__suppress_context__"].__get__(error)
        following = cause if cause is not None else None if hides else context
        if following is None or id(following) in known:
            return
        known.add(id(following))
        yield cause is not None, following
        error = following


def notes_of(error: BaseException) -> list[Any]:
    """Return the notes of an exception. Never raises."""
    notes = get_attribute(error, "__notes__")
    return notes if type(notes) is list else []


def add_note(error: BaseException, text: str) -> None:
    """Add a note, also to an exception that refuses changes. Never raises."""
    set_attribute(error, "__notes__", [*notes_of(error), text])


class Stripped:
    """Pickles as the exception it was made from, with its parts replaced.

    For exceptions that hold what can't be pickled: see `farcall.serde.failures`.
    """

    __slots__ = ("parts",)

    def __init__(
        self, cls: type[BaseException], args: tuple[Any, ...], *states: dict[str, Any]
    ) -> None:
        self.parts = (cls, args, *states)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return rebuild_exception, self.parts


def type_name_of(error: object) -> str:
    """Return the qualified name of an object's type, such as an exception's; built-in ones without
    their module.

    Never raises.
    """
    try:
        cls = type(error)
        # Past a metaclass.
        name = vars(type)["__qualname__"].__get__(cls)
        module = vars(type)["__module__"].__get__(cls)
        return encodable(clipped(name if module == "builtins" else f"{module}.{name}", MAX_NAME))
    except BaseException:
        return "a type that has no name"


def message_of(error: BaseException) -> str:
    """Return `str(error)`, or a note that it failed. Never raises."""
    try:
        return encodable(str(error))
    except BaseException as failure:
        return f"<str() of the exception raised {type(failure).__name__}>"


def repr_of(value: object) -> str:
    """Return `repr(value)`, or the name of its type. Never raises."""
    try:
        return encodable(repr(value))
    except BaseException:
        return f"<{type(value).__name__}>"
