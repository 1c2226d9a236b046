"""The rights of other workers here: the option `policy`."""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Callable, Mapping
from typing import Any

from farcall.errors import Refused
from farcall.runtime.calls.call_names import checks_itself, works_on_slot
from farcall.serde import Only, Unlisted, name_of, name_of_class

# The kinds of objects that a class body defines as a method. Anything else that can be called, such
# as a property's value, a callable in an attribute, or a partial, may be another's function.
_METHODS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)


class Policy:
    """The rights of each worker here. Immutable.

    Args:
        given: for all workers; or by pattern (`fnmatch`) of their names, of which the first that
            matches counts; None: everything, and messages are pickles.
    """

    __slots__ = ("_rules",)

    def __init__(self, given: Only | Mapping[str, Only] | None = None) -> None:
        self._rules = {"*": given} if isinstance(given, Only) else given and dict(given)

    @property
    def is_strict(self) -> bool:
        """Return whether there is one, so that nothing is unpickled here."""
        return self._rules is not None

    def of(self, worker: str) -> Only | None:
        """Return what a worker of this name may do, or None if that is everything."""
        if self._rules is None:
            return None
        for pattern, only in self._rules.items():
            if fnmatch.fnmatchcase(worker, pattern):
                return only
        return Unlisted(worker)


def check(only: Only, name: str) -> None:
    """Raises Refused unless the function of this name may be called. "" is one sent by value.

    Those of farcall's own handlers always may be that check themselves what they are asked for.
    """
    if not checks_itself(name):
        only.check(name)


def check_target(name: str, *, is_slot: bool) -> None:
    """Raise Refused if a handler that works on slots is called without a reference.

    It would use whatever came in the place of the slot, and call what that has for methods.
    """
    if not is_slot and works_on_slot(name):
        raise Refused(f"this worker does not allow calls of {name!r} without a reference")


def check_maker(only: Only | None, function: object) -> None:
    """Raise Refused unless the caller may call what it has sent as a function.

    An object of a type that is listed may be callable. That it may arrive does not mean that it may
    be called.
    """
    if only is not None:
        only.check(name_of(function) or "")


def method_of(only: Only | None, value: object, name: str) -> Callable[..., Any]:
    """Return a method of a value, bound to it, if the caller may call it.

    It is looked up on the type, where an attribute of the value can't stand in its place, and no
    code of the type runs for that. A policy has to list "module:Class.method" with the class
    that defines it, not that of the value, which may inherit it. If the function found there has
    another name of its own, this must be listed, too.

    Raises:
        Refused: it is not listed, or is no method that the type defines.
        AttributeError: everything is allowed, and there is nothing of that name.
    """
    if only is None:
        return getattr(value, name)  # type: ignore[no-any-return]
    kind = type(value)
    mro = type.__dict__["__mro__"].__get__(kind)
    owner = next((one for one in mro if name in type.__dict__["__dict__"].__get__(one)), kind)
    found: Any = type.__dict__["__dict__"].__get__(owner).get(name)
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    asked = f"{name_of_class(kind)}.{name}"
    if not isinstance(function, _METHODS):
        raise Refused(
            f"this worker does not allow calls of {asked!r}: it is not a method that the type "
            "defines"
        )
    if isinstance(found, classmethod | types.ClassMethodDescriptorType):
        function = found.__get__(None, owner)  # only bound to its class it has a name
    wanted = [name_of(function), f"{name_of_class(owner)}.{name}"]
    if getattr(function, "__objclass__", None) is owner:
        del wanted[1]  # torch's have another name than their hidden class
    for actual in wanted:
        if actual is None or not only.allows(actual):
            raise Refused(
                f"this worker does not allow calls of {asked!r}"
                + (f", which is {actual!r}" if actual not in (None, asked) else "")
                + f": {only.reason}"
            )
    # A builtin such as `os.system` does not bind: as a class attribute it is called as it is.
    return found.__get__(value, kind) if hasattr(found, "__get__") else found  # type: ignore[no-any-return]
