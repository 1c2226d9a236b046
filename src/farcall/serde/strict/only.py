"""The rights that a worker gives others: `Only`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from farcall.errors import Refused
from farcall.plain import whole_number
from farcall.serde.functions import name_of, resolve

MAX_OBJECTS = 1_000_000


class Only:
    """A policy: callers may run these functions, send objects of these types, and nothing else.

    A worker with such a policy reads no pickles: arguments of calls, and results and errors of its
    own calls, arrive in a format that has no code in it. Immutable, and safe from any thread.

    Args:
        functions: what callers may run, or pass to a function that runs it: functions, classes,
            and methods ("app:Model.forward", or `Model.forward`) that may be called through a
            reference. Each is an object or its exact name, "module:qualname". A name allows the
            definition there, and nothing that the module happens to have imported.
        types: classes of which objects may arrive, beside plain data, tensors, references and
            built-in exceptions: dataclasses, named tuples, enums, structs of msgspec, exceptions,
            modules, and other classes whose state is in `__dict__` or `__slots__`. An object is
            made without calling its `__init__`, `__setstate__` or `__reduce__`.
        max_objects: how many objects one message may hold.

    Raises:
        TypeError: an entry is of another kind.
        ValueError: a function has no name by which others find it; a name is not of the form
            "module:qualname", or is a pattern.
    """

    __slots__ = ("_names", "_types", "max_objects")

    def __init__(
        self,
        functions: Iterable[Callable[..., Any] | str] = (),
        types: Iterable[type] = (),
        *,
        max_objects: int = MAX_OBJECTS,
    ) -> None:
        self.max_objects = whole_number("max_objects", max_objects, 1)
        self._names = frozenset(map(_name, _several(functions, "functions")))
        self._types: dict[str, type] = {
            _name_of_type(kind): kind for kind in _several(types, "types")
        }

    @property
    def reason(self) -> str:
        """Return the end of messages about calls that are refused: what the policy lacks."""
        return "its policy=Only(functions=[...]) does not list it"

    def __repr__(self) -> str:
        more = "" if self.max_objects == MAX_OBJECTS else f", max_objects={self.max_objects}"
        functions, types = sorted(self._names), sorted(self._types)
        return f"Only(functions={functions!r}, types={types!r}{more})"

    def allows(self, name: str) -> bool:
        """Return whether callers may run the function or class of a name."""
        return name in self._names

    def check(self, name: str) -> None:
        """Raise Refused unless callers may run the function or class of a name; "" has none."""
        if not name:
            raise Refused("this worker runs only functions that are named; this one came by value")
        if name not in self._names:
            raise Refused(f"this worker does not allow calls of {name!r}: {self.reason}")

    def find(self, name: str) -> Callable[..., Any]:
        """Return the function or class of a name, for one that is passed to a function.

        Nothing is imported for a name that is not allowed.

        Raises:
            Refused: callers may not run it.
            FunctionNotFound: there is no such thing here.
        """
        self.check(name)
        found = resolve(name)
        check_defined(name, found)
        return found

    def type_of(self, name: str) -> type:
        """Return the class of a name, of which objects may arrive.

        Raises:
            Refused: none may.
        """
        kind = self._types.get(name)
        if kind is None:
            raise Refused(
                f"this worker takes plain data and tensors only, and refuses an object of type "
                f"{name!r}: its policy=Only(types=[...]) does not list it"
            )
        return kind


class Unlisted(Only):
    """The rights of a worker whose name no pattern of a policy matches: none.

    Args:
        worker: its name.
    """

    __slots__ = ("_worker",)

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    @property
    def reason(self) -> str:
        """See `Only`."""
        return f"no pattern of its policy matches the name of the caller, {self._worker!r}"


def check_defined(name: str, found: Callable[..., Any]) -> None:
    """Raise Refused if the function under an allowed name is really another module's.

    "app:os.system" leads to a function, but not to one that app defines.
    """
    if name_of(found) != name:
        raise Refused(f"this worker does not allow calls of {name!r}: it is not defined there")


def _several(given: Any, what: str) -> list[Any]:
    if isinstance(given, str | bytes | type) or not isinstance(given, Iterable):
        raise TypeError(f"{what} must be several, for instance a list, not {given!r}")
    return list(given)


def _name(entry: Any) -> str:
    if isinstance(entry, str):
        module, _, path = entry.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
            raise ValueError(
                f"functions: {entry!r} is not of the form 'module:qualname'; there are no patterns"
            )
        return entry
    if not callable(entry):
        raise TypeError(f"functions: {entry!r} is neither a function nor its name")
    name = name_of(entry)
    if name is None:
        raise ValueError(f"functions: {entry!r} has no name by which callers could find it")
    return name


def _name_of_type(kind: Any) -> str:
    if not isinstance(kind, type):
        raise TypeError(f"types: {kind!r} is not a class")
    return name_of_class(kind)


def name_of_class(kind: type) -> str:
    """Return "module:qualname" of a class; no code of its metaclass runs."""
    module = type.__dict__["__module__"].__get__(kind)
    name = type.__dict__["__qualname__"].__get__(kind)
    return f"{'__main__' if module == '__mp_main__' else module}:{name}"
