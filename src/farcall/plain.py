"""Plain texts and numbers in the place of a user's subclasses of them, which msgpack does not know.

Names and roles that come out of numpy, an `Enum` or a framework's configuration are `str` of a
subclass, and ranks and counts are often numpy's. Code that keeps such a value, or sends it, passes
it through here first. The encoder of messages is the last to do so, for what an exception of a
user's says of itself.
"""

from __future__ import annotations

import operator

import msgspec


def plain_text(given: str) -> str:
    """Return the same text as a `str` of no subclass. Runs no code of a subclass."""
    return str.__str__(given)


def whole_number(what: str, given: object, lowest: int | None = None) -> int:
    """Return a number that a user gave as an `int`: one of Python's, numpy's or a tensor's.

    Args:
        what: its name, for the message.
        lowest: that it may be; None: it may be any.

    Raises:
        TypeError: it is no whole number; a `bool` is none.
        ValueError: it is too low.
    """
    if isinstance(given, bool) or not hasattr(type(given), "__index__"):
        raise TypeError(f"{what} must be an int, not {type(given).__name__}")
    try:
        number = int.__index__(operator.index(given))  # type: ignore[arg-type]  # has __index__
    except TypeError:  # a tensor has the method, and may hold something else
        raise TypeError(f"{what} must be an int, not a {type(given).__name__}: {given}") from None
    if lowest is not None and number < lowest:
        raise ValueError(f"{what} must be at least {lowest}, not {number}")
    return number


def _plain(value: object) -> object:
    """Return what stands for a value that msgpack does not know."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    raise TypeError(f"messages have no {type(value).__name__}")


# Encodes all that goes to another process as msgpack.
encode_msgpack = msgspec.msgpack.Encoder(enc_hook=_plain).encode
