"""Which functions and methods callers may run here: the option `allow_functions`."""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Callable, Collection
from typing import Any

from farcall.errors import Refused
from farcall.serde import name_of

OWN_HANDLERS = frozenset(
    [f"farcall.rref:{name}" for name in ("fetch", "type_of", "call_method", "run_backward")]
    + [f"farcall.autograd.handlers:{name}" for name in ("survey", "prepare", "cause", "abort")]
)

# What a class body defines as a method. Anything else that can be called, such as a property's
# value, a callable in an attribute, or a partial, may be another's function.
_METHODS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)


class Policy:
    """Which functions may be called from elsewhere.

    Args:
        allow_functions: patterns (`fnmatch`) of "module:qualname"; None allows everything.
    """

    def __init__(self, allow_functions: Collection[str] | None = None) -> None:
        if isinstance(allow_functions, str):
            raise TypeError("allow_functions must be several strings: each letter would be one")
        self._patterns = None if allow_functions is None else tuple(allow_functions)
        self.allows_all = allow_functions is None

    def check(self, name: str) -> None:
        """Raises Refused unless the function of this name may be called. "" is one sent by value.

        farcall's own handlers may always be: they check what they are asked to call.
        """
        if self._patterns is None or name in OWN_HANDLERS:
            return
        if not name:
            raise Refused("this worker runs only functions that are named; this one came by value")
        if not self._matches(name):
            raise Refused(f"this worker does not allow calls of {name!r}")

    def _matches(self, name: str) -> bool:
        _, dot, last = name.partition(":")[2].rpartition(".")
        is_private = bool(dot) and last.startswith("_")
        return any(
            fnmatch.fnmatchcase(name, pattern)
            # "app:Model.*" is not meant to let callers run `__setattr__`.
            and (not is_private or pattern.endswith((f".{last}", f":{last}")))
            for pattern in self._patterns or ()
        )

    def check_found(self, name: str, function: Callable[..., Any]) -> None:
        """Raises Refused if the function that was found is really another's.

        "app:os.system" would match the pattern "app:*" if app imports os.
        """
        if self._patterns is not None and name_of(function) != name:
            raise Refused(f"this worker does not allow calls of {name!r}: it is not defined there")

    def method_of(self, value: object, name: str) -> Callable[..., Any]:
        """Return a method of a value, bound to it, if callers may call it.

        It is looked up on the type, where an attribute of the value can't stand in its place. What
        has to match is the name of the function found there, "module:Class.method" with the class
        that defines it, not with that of the value, which may inherit it; and if the function has
        a second name in that class, this one, too.

        Raises:
            Refused: the policy does not allow it, or it is no method that the type defines.
            AttributeError: everything is allowed, and there is nothing of that name.
        """
        if self._patterns is None:
            return getattr(value, name)  # type: ignore[no-any-return]
        kind = type(value)
        owner = next((one for one in kind.__mro__ if name in vars(one)), kind)
        found: Any = vars(owner).get(name)
        function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        asked = f"{name_of(kind) or kind.__qualname__}.{name}"
        if not isinstance(function, _METHODS):
            raise Refused(
                f"this worker does not allow calls of {asked!r}: it is not a method that the type "
                "defines"
            )
        if isinstance(found, classmethod | types.ClassMethodDescriptorType):
            function = found.__get__(None, owner)  # only bound to its class it has a name
        for actual in (name_of(function), f"{name_of(owner) or ''}.{name}"):
            if actual is None or not self._matches(actual):
                raise Refused(
                    f"this worker does not allow calls of {asked!r}"
                    + (f", which is {actual!r}" if actual not in (None, asked) else "")
                )
        # A builtin such as `os.system` does not bind: as a class attribute it is called as it is.
        return found.__get__(value, kind) if hasattr(found, "__get__") else found  # type: ignore[no-any-return]
