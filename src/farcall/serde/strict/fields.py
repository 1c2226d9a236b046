"""Fields of built-in exceptions that Python believes while it prints them, and combined flags.

The printing of an exception reads its text at its positions, draws as many marks as they say, and
may import the module that it names.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from farcall.errors import Refused

MOST_COLUMNS = 1 << 16
MOST_LINES = 1 << 24
# Combinations of flags that a class may have when it gets another one from a peer. It keeps all of
# them as long as the process runs.
MOST_COMBINATIONS = 4096

_UNICODE_ERRORS: dict[type, tuple[type, ...]] = {
    UnicodeDecodeError: (str, bytes, int, int, str),
    UnicodeEncodeError: (str, str, int, int, str),
    UnicodeTranslateError: (str, int, int, str),
}
# Of a SyntaxError's second argument, by position, and its attributes of the same names.
_PLACE = ("filename", "lineno", "offset", "text", "end_lineno", "end_offset")
_LIMITS = {
    "lineno": MOST_LINES,
    "end_lineno": MOST_LINES,
    "offset": MOST_COLUMNS,
    "end_offset": MOST_COLUMNS,
}
_TEXTS = ("filename", "text", "msg", "print_file_and_line")


# Exceptions ---------------------------------------------------------------------------------------


def unicode_error(kind: type) -> type | None:
    """Return the built-in class of this kind whose fields are its arguments."""
    return next((base for base in _UNICODE_ERRORS if issubclass(kind, base)), None)


def checked_parts(
    kind: type[BaseException], args: tuple[Any, ...], state: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and the attributes with which an exception can be printed.

    Columns and lines of a `SyntaxError` are cut down to some that are printed quickly.

    Raises:
        ValueError: a field is of another type than Python expects, or is a position beyond a text.
        Refused: an attribute may not be set.
    """
    checked = dict(state)
    if "args" in checked:  # the arguments are checked as such, and a copy is made of them
        raise Refused(f"this worker takes no {kind.__qualname__} with an attribute 'args'")
    family = unicode_error(kind)
    if family is not None:
        _check_unicode_error(family, args)
        for name in checked:
            if name in vars(family):
                raise Refused(
                    f"this worker takes no {kind.__qualname__} with an attribute {name!r}"
                )
    if issubclass(kind, SyntaxError):
        args = _checked_place(args)
        checked = {name: _checked_field(name, value) for name, value in checked.items()}
        # Python 3.14 compiles this source code to find typing errors.
        checked.pop("_metadata", None)
    if issubclass(kind, ImportError):
        checked.pop("name_from", None)  # with this, Python 3.12 imports the module `name`
    return args, checked


def _check_unicode_error(family: type, args: tuple[Any, ...]) -> None:
    """Check the positions: `str` of the exception reads there without looking."""
    wanted = _UNICODE_ERRORS[family]
    if tuple(map(type, args)) != wanted:
        raise ValueError(f"no arguments of a {family.__name__}")
    *_, start, end, _ = args
    if not 0 <= start <= end <= len(args[wanted.index(int) - 1]):
        raise ValueError(f"a {family.__name__} of positions that are not in its text")


def _checked_place(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if args:
        _checked_field("msg", args[0])
    if len(args) != 2:
        return args
    if type(args[1]) is not tuple:
        raise ValueError("the place of a SyntaxError is no tuple")
    fields = zip(_PLACE, args[1], strict=False)
    return args[0], tuple(_checked_field(name, value) for name, value in fields)


def _checked_field(name: str, value: Any) -> Any:
    if value is None:
        return value
    if name in _LIMITS:
        if type(value) is not int:
            raise ValueError(f"the {name} of a SyntaxError is no number")
        return max(-1, min(value, _LIMITS[name]))
    if name in _TEXTS and type(value) is not str:
        raise ValueError(f"the {name} of a SyntaxError is no text")
    return value


# Flags --------------------------------------------------------------------------------------------


def combination(kind: type[enum.Flag], value: int) -> enum.Flag:
    """Return the combination of flags of a class that has this number.

    Raises:
        ValueError: the class has no such flags.
        Refused: the class has too many combinations already.
    """
    kept = kind._value2member_map_
    if value not in kept and len(kept) >= len(kind.__members__) + MOST_COMBINATIONS:
        raise Refused(
            f"this worker takes no more than {MOST_COMBINATIONS} combinations of the flags of "
            f"{kind.__qualname__!r}: the class keeps them all"
        )
    return kind(value)
